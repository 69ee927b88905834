"""What the image of the template brings, and what is to be installed on it."""

import re
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent

# The image's versions of these hold there, but for those that something refuses.
BROUGHT = {"ipywidgets", "matplotlib", "numpy", "pandas", "pyarrow", "pydantic"}
BROUGHT |= {"pyyaml", "ray", "tqdm"}
REFUSED = {"pyarrow": "datasets 5.2 needs 24 or newer; the image of Ray 2.57 has 23"}


def read_pins(
    name: str = "requirements-gpu.txt", python: str = "3.12", arm: bool = False
) -> dict[str, str]:
    """The pins of a requirements file for one Python on Linux, by package, with extras."""
    target = {"python_version": python, "python_full_version": f"{python}.0"}
    target["sys_platform"] = "linux"
    target["platform_machine"] = "aarch64" if arm else "x86_64"
    lines = (ROOT / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and line[0] != "#"]
    found = [r for r in found if not r.marker or r.marker.evaluate(target)]
    return {r.name: str(r).partition(";")[0] for r in found}


def requirements(image: str) -> str:
    """A requirements file of what `image` lacks, and of what is refused, with the reason."""
    lines = [f"# What {image} lacks; the rest comes with it."]
    for name, pin in read_pins().items():
        if name in REFUSED:
            lines.append(f"{pin}  # {REFUSED[name]}")
        elif name not in BROUGHT:
            lines.append(pin)
    return "\n".join(lines) + "\n"


def differences(image: str, lists: Path) -> list[str]:
    """Where the versions of `image` differ from those tested here, by the registry's lists.

    Raises:
        SystemExit: if the image brings less than BROUGHT says.
    """
    name = re.sub(r"^anyscale/(.*):", r"\1-", image) + ".freeze.txt"
    if not (lists / name).is_file():
        return [f"{lists} has no {name} yet, so what the image brings isn't checked."]
    found = re.findall(r"^([\w.-]+)==(\S+)", (lists / name).read_text(), re.M)
    there = {re.sub(r"[-_.]+", "-", n).lower(): version for n, version in found}
    if missing := sorted(BROUGHT - there.keys()):
        raise SystemExit(
            f"{name} lacks {missing}. Take them out of BROUGHT, ci/image.py."
        )
    here = {n: pin.split("==")[1] for n, pin in read_pins().items() if n in BROUGHT}
    differ = [n for n in here if here[n] != there[n]]
    return [f"{n}: {here[n]} here, {there[n]} in the image" for n in differ]
