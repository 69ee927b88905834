"""What the image of the template brings, and what is to be installed on it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The image's versions of these hold there, but for those that something refuses.
BROUGHT = {"ipywidgets", "matplotlib", "numpy", "pandas", "pyarrow", "pydantic"}
BROUGHT |= {"pyyaml", "ray", "tensorboardx", "tqdm"}
REFUSED = {"pyarrow": "datasets 5.2 needs 24 or newer; the image of Ray 2.57 has 23"}


def read_pins() -> dict[str, str]:
    """The lines of requirements-gpu.txt, by package."""
    lines = (ROOT / "requirements-gpu.txt").read_text().splitlines()
    return {m[1]: m[0] for line in lines if (m := re.match(r"([\w-]+)\S*==\S+", line))}


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
