"""Make the addresses of a page absolute: of its images, and of the files it links to."""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GITHUB, RAW = "https://github.com/", "https://raw.githubusercontent.com/"
ABSOLUTE = re.compile(r"[a-z][a-z\d+.-]*:|//|#", re.I)  # or a place on the page itself
LINK = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)|(?<!`)(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
    r"|(?P<before>!\[[^\]]*\]\(|\]\(|^\[[^\]]+\]:\s+"
    r"|<(?:img|a)\s[^>]*?(?:src|href)=[\"']?)"
    r"(?P<to>[^\s)\"'>]+)",
    re.I | re.M | re.S,
)


class Addresses:
    """Where our files are on GitHub: carried to another repository, or in our own."""

    def __init__(self, carried: dict[str, str], repository: str, source: str):
        """`carried` has the path in `repository` of each file that is carried there."""
        self.carried, self.repository, self.source = carried, repository, source

    def absolute(self, page: str, to: str, image: bool) -> str:
        """The address of what `page` names by the relative path `to`.

        Raises:
            SystemExit: if there is no such file.
        """
        path, mark, anchor = to.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        if path.startswith("..") or not (ROOT / path).exists():
            raise SystemExit(f"{page} names {to}, which isn't there. Correct the link.")
        base = self.repository if path in self.carried else self.source
        there = self.carried.get(path, path)
        if image:
            return f"{base.replace(GITHUB, RAW)}/main/{there}"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{base}/{kind}/main/{there}{mark}{anchor}"

    def rewrite(self, page: str, text: str) -> str:
        """The Markdown `text` of `page`, changed in its addresses only; code stays."""

        def change(match: re.Match) -> str:
            if not match["to"] or ABSOLUTE.match(match["to"]):
                return match[0]
            image = match["before"].lower().startswith(("!", "<img"))
            return match["before"] + self.absolute(page, match["to"], image)

        return LINK.sub(change, text)
