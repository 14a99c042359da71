"""Pages in Chromium, by its command line alone: pictures of them, and what a script finds in them.

    python tests/helpers/chromium.py FOLDER PAGE.html...    FOLDER/PAGE-390-light.png, -390-dark, -1280-light ..."""

import functools
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTHS = (390, 1280)  # a phone's and a desktop's, px
THEMES = {"light": [], "dark": ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]}
LIMIT = 900  # seconds: it hangs

# Frames of every page at every width; of each how far it scrolls sideways, by which elements, and texts of pictures
# that are too small or outside. They are of one origin, so that the script may look into them.
FRAMES = """<!doctype html><meta charset="utf-8"><body>%s<pre id="found"></pre><script>
function wide(doc) {
  const room = doc.documentElement.clientWidth + 1
  const out = [...doc.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > room && !held(e))
  return out.slice(0, 5).map(e => e.tagName + "." + e.className + ": " + e.textContent.trim().slice(0, 40))
}
function held(e) {  // by something that scrolls by itself, or beside the page
  const style = e.ownerDocument.defaultView.getComputedStyle(e)
  if (style.position == "fixed") return true
  const up = e.parentElement
  return up.tagName != "BODY" && (up.ownerDocument.defaultView.getComputedStyle(up).overflowX != "visible" || held(up))
}
function look(frame) {
  const doc = frame.contentDocument, view = frame.contentWindow, small = [], outside = []
  for (const svg of doc.querySelectorAll("svg[role=img]")) {
    const all = svg.getBoundingClientRect(), scale = all.width / svg.viewBox.baseVal.width
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBoundingClientRect()
      if (parseFloat(view.getComputedStyle(text).fontSize) * scale < 9) small.push(text.textContent)
      if (box.left < all.left - 2 || box.right > all.right + 2) outside.push(text.textContent)
    }
  }
  return { page: frame.dataset.page, width: +frame.width, scroll: doc.documentElement.scrollWidth,
           client: doc.documentElement.clientWidth, wide: wide(doc), small, outside,
           text: doc.body.innerText.length }
}
addEventListener("load", () => {
  document.getElementById("found").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(look))
})
</script>"""


def program() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def run(*arguments: str, theme: str = "light") -> str:
    found = program()
    assert found is not None
    words = [found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
             *THEMES[theme], *arguments]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, subprocess.Popen(
            [*words, f"--user-data-dir={profile}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True) as running:
        try:
            out, said = running.communicate(timeout=LIMIT)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)  # it has a dozen processes
    assert running.returncode == 0, said[-2000:]
    return out


def looked(folder: Path, pages: Sequence[str]) -> list[dict[str, Any]]:
    """Layout of pages at each of WIDTHS: widths, elements too ``wide``, texts too ``small`` or ``outside``, letters."""
    frames = "".join(f'<iframe data-page="{html.escape(page)}" src="{html.escape(page)}" width="{width}" height="900">'
                     "</iframe>" for page in pages for width in WIDTHS)
    (folder / "frames.html").write_text(FRAMES % frames)
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            text = run("--virtual-time-budget=20000", "--dump-dom",
                       f"http://127.0.0.1:{server.server_port}/frames.html")
        finally:
            server.shutdown()
            (folder / "frames.html").unlink()
    found = re.search(r'<pre id="found">(.+?)</pre>', text, re.DOTALL)
    assert found, text[-2000:]
    return json.loads(html.unescape(found[1]))


def fits(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["text"] > 200, f"{one['page']} is empty"
        assert one["scroll"] <= one["client"], one
        assert not one["small"] and not one["outside"], one


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def picture(page: Path, output: Path, width: int, theme: str, height: int = 2400) -> None:
    run(f"--window-size={width},{height}", f"--screenshot={output}", page.resolve().as_uri(), theme=theme)


def main() -> None:
    if len(sys.argv) < 3 or program() is None:
        sys.exit(__doc__ if program() else "no Chromium is installed")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for page in map(Path, sys.argv[2:]):
        for width in WIDTHS:
            for theme in THEMES:
                picture(page, folder / f"{page.stem}-{width}-{theme}.png", width, theme)


if __name__ == "__main__":
    main()
