"""One page in Qt WebEngine, which is Chromium, without a screen: what it said, asked for and showed.

Started by `tests.browser` as a process of its own, so that the engine's threads and files end with it:
``browser_process.py PAGE WIDTH PICTURE`` draws the whole page into PICTURE and writes one JSON object to stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import shiboken6
from PySide6.QtCore import QTimer, QUrl
from PySide6.QtGui import QColor
from PySide6.QtWebEngineCore import (
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineScript,
    QWebEngineSettings,
    QWebEngineUrlRequestInfo,
    QWebEngineUrlRequestInterceptor,
)
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

# Our scripts see the page and its events, and share no variable with it.
OURS = QWebEngineScript.ScriptWorldId.ApplicationWorld.value
POLL_MILLISECONDS = 20
# A page takes one second here; many times as long, and it never comes.
GIVE_UP_MILLISECONDS = 60_000
# Shown in a corner together with all that was there before: a picture that has it has everything.
MARK = QColor(255, 0, 254)

# Scripts that fail say so on the console; elements that load nothing only have an event, which does not bubble.
LISTEN = """
var failed = [];
addEventListener('error', event => { if (event.target !== window) failed.push(event.target.outerHTML); }, true);
"""
SIZE = "JSON.stringify([document.documentElement.scrollHeight, document.documentElement.scrollWidth])"
SHOW_THE_MARK = f"""
Promise.allSettled([...document.images].map(image => image.decode())).then(() => {{
    const mark = document.createElement('div');
    mark.style = 'position:fixed;right:0;bottom:0;width:4px;height:4px;background:{MARK.name()}';
    document.documentElement.append(mark);
}});
"""
REPORT = """JSON.stringify({
    failed: failed,
    requested: performance.getEntriesByType('resource').map(entry => entry.name),
    title: document.title,
    text: document.body.innerText,
    scripts: document.scripts.length,
    pictures: [...document.images].map(image => {
        const {x, y, width, height} = image.getBoundingClientRect();
        return {id: image.id, natural: [image.naturalWidth, image.naturalHeight], box: [x, y, width, height]};
    }),
    out_of_reach: [...document.querySelectorAll('pre')].map(table => {
        table.scrollLeft = table.scrollWidth;
        return table.scrollWidth - table.clientWidth - table.scrollLeft;
    }),
})"""


class Requests(QWebEngineUrlRequestInterceptor):
    """Lets the page itself be read; other files and sockets are noted, and refused."""

    def __init__(self, page: QUrl) -> None:
        super().__init__()
        self.page = page
        self.refused: list[str] = []

    def interceptRequest(self, info: QWebEngineUrlRequestInfo) -> None:
        url = info.requestUrl()
        if url != self.page:
            self.refused.append(url.toString())
            info.block(True)


class Page(QWebEnginePage):
    """Keeps what the console shows, and what a box would."""

    def __init__(self, profile: QWebEngineProfile, parent: QWebEngineView) -> None:
        super().__init__(profile, parent)
        self.console: list[str] = []

    def javaScriptConsoleMessage(
        self, level: QWebEnginePage.JavaScriptConsoleMessageLevel, message: str, line: int, source: str
    ) -> None:
        self.console.append(f"{level.name}: {message} (line {line})")

    def javaScriptAlert(self, origin: QUrl | str, message: str) -> None:
        self.console.append(f"alert: {message}")  # and nobody has to close it


class Visit:
    """Load, lay out at full height, wait for the frame that shows all of it, draw, report."""

    def __init__(self, url: QUrl, width: int, picture: Path) -> None:
        self.url, self.width, self.picture = url, width, picture
        self.found: dict[str, Any] = {}
        self.requests = Requests(url)
        self.profile = QWebEngineProfile()  # without a name it keeps nothing on disk
        self.profile.setUrlRequestInterceptor(self.requests)
        self.view = QWebEngineView()
        self.page = Page(self.profile, self.view)
        listen = QWebEngineScript()
        listen.setSourceCode(LISTEN)
        listen.setInjectionPoint(QWebEngineScript.InjectionPoint.DocumentCreation)
        listen.setWorldId(OURS)
        self.page.scripts().insert(listen)
        self.page.settings().setAttribute(QWebEngineSettings.WebAttribute.ShowScrollBars, False)
        self.view.setPage(self.page)
        self.view.resize(width, 800)
        self.timer = QTimer()
        self.timer.setInterval(POLL_MILLISECONDS)
        self.timer.timeout.connect(self.look)
        self.page.loadFinished.connect(self.measure)
        self.page.renderProcessTerminated.connect(self.give_up)

    def start(self) -> None:
        self.view.show()
        self.page.load(self.url)
        QTimer.singleShot(GIVE_UP_MILLISECONDS, self.give_up)

    def give_up(self) -> None:
        QApplication.exit(1)

    def measure(self, loaded: bool) -> None:
        self.found["loaded"] = loaded
        self.page.runJavaScript(SIZE, OURS, self.lay_out)

    def lay_out(self, size: str) -> None:
        height, self.found["scroll_width"] = json.loads(size)
        self.view.resize(self.width, height)
        self.page.runJavaScript(SHOW_THE_MARK, OURS)
        self.timer.start()

    def look(self) -> None:
        image = self.view.grab().toImage()
        if image.pixelColor(image.width() - 2, image.height() - 2) == MARK:
            self.timer.stop()
            image.save(str(self.picture))
            self.page.runJavaScript(REPORT, OURS, self.report)

    def report(self, report: str) -> None:
        self.found |= json.loads(report)
        # What a file asks of other hosts the engine refuses by itself, before `Requests` sees it.
        self.requests.refused += self.found.pop("requested")
        QApplication.quit()

    def end(self) -> dict[str, Any]:
        """All that was found. The page goes before its profile does."""
        found = self.found | {"console": self.page.console, "refused": self.requests.refused}
        shiboken6.delete(self.view)
        return found


def main(page: str, width: str, picture: str) -> int:
    application = QApplication(["browser"])
    visit = Visit(QUrl.fromLocalFile(page), int(width), Path(picture))
    visit.start()
    code = application.exec()
    json.dump(visit.end(), sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
