"""What pyproject.toml cannot say: the package's page, which is the README with links that lead somewhere.

    ECORNN_REPOSITORY=https://HOST/OWNER/ecornn/blob/main python -m build

makes them links to the files there, and names that address. Without it, as long as the repository has no public one,
links are their words, and pictures are left out.
"""

import os
import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^()\s]*)\)")  # within the repository
COMMENT = re.compile(r"<!-- .*? -->")


def page(text: str, address: str) -> str:
    """The README for readers who have only that."""
    def one(match: re.Match) -> str:
        picture, words, path = match.groups()
        if address:
            return f"{picture}[{words}]({address}/{path})"
        return "" if picture else words

    return LINK.sub(one, COMMENT.sub("", text))


if __name__ == "__main__":
    address = os.environ.get("ECORNN_REPOSITORY", "").rstrip("/")
    setup(long_description=page(Path(__file__).with_name("README.md").read_text(encoding="utf-8"), address),
          long_description_content_type="text/markdown", project_urls={"Source": address} if address else {})
