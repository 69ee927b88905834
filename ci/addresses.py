"""Make the addresses of a page absolute: of its images, and of the files it links to."""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GITHUB, RAW = "https://github.com/", "https://raw.githubusercontent.com/"
ABSOLUTE = re.compile(r"[a-z][a-z\d+.-]*:|//|#", re.I)  # or a place on the page itself
LINK = re.compile(
    r"(?P<ticks>(?<!`)`+(?!`)).+?(?<!`)(?P=ticks)(?!`)"  # code, which stays as it is
    r"|(?P<before>!\[[^\]]*\]\(|\]\(|^\[[^\]]+\]:\s+"
    r"|<(?:img|a)\s[^>]*?(?:src|href)=[\"']?)"
    r"(?P<to>[^\s)\"'>]+)",
    re.I,
)


class Addresses:
    """Where our files are on GitHub: carried to another repository, or in `source`.

    Attributes:
        left_behind: the files that are linked to and aren't carried.
    """

    def __init__(
        self, carried: dict[str, str], repository: str, branch: str, source: str
    ):
        """`carried` has the path in `repository` of each file that is carried there."""
        self.carried, self.left_behind = carried, set()
        self.repository, self.branch = repository, branch
        self.source = source.rstrip("/")

    def absolute(self, page: str, to: str, image: bool) -> str:
        """The address of what `page` names by the relative path `to`.

        Raises:
            SystemExit: if there is no such file.
        """
        path, mark, anchor = to.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        if path.startswith("..") or not (ROOT / path).exists():
            raise SystemExit(f"{page} names {to}, which isn't there. Correct the link.")
        if there := self.carried.get(path):
            base, branch = self.repository, self.branch
        else:
            base, branch, there = self.source, "main", path
            self.left_behind.add(path)
        if image:
            return f"{base.replace(GITHUB, RAW)}/{branch}/{there}"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{base}/{kind}/{branch}/{there}{mark}{anchor}"

    def rewrite(self, page: str, text: str) -> str:
        """The Markdown `text` of `page`, changed in its addresses only; code stays."""

        def change(match: re.Match) -> str:
            if match["ticks"] or ABSOLUTE.match(match["to"]):
                return match[0]
            image = match["before"].lower().startswith(("!", "<img"))
            return match["before"] + self.absolute(page, match["to"], image)

        lines, fence = text.split("\n"), None
        for i, line in enumerate(lines):
            mark = re.match(r"\s*(`{3,}|~{3,})", line)
            if mark and fence is None:
                fence = mark[1]
            elif mark and mark[1].startswith(fence):
                fence = None
            elif fence is None:
                lines[i] = LINK.sub(change, line)
        return "\n".join(lines)
