"""A page in a real browser (the Chromium of QtWebEngine), where one is installed: ``pip install PySide6``.

``QT_PYTHON`` names a Python that has it, if this one has not.
"""

import json
import os
import subprocess
import sys

FLAGS = "--no-sandbox --disable-gpu"
RUN = """
(async () => {
  await new Promise((done) => setTimeout(done, 300));
  return await (async () => { %s })();
})().then(
  (result) => { window.answer = JSON.stringify({ result }); },
  (error) => { window.answer = JSON.stringify({ error: String(error) }); },
);
"""


def browser_python():
    """A Python that can show pages, or None."""
    for python in (sys.executable, os.environ.get("QT_PYTHON")):
        probe = [python, "-c", "import PySide6.QtWebEngineWidgets"]
        if python and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return python
    return None


def in_browser(python, page, script):
    """What the body of an async function gives in a page; with the page's messages, dialogs and requests."""
    settings = {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": FLAGS}
    command = [python, __file__, str(page), script]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env={**os.environ, **settings}
    )
    return json.loads(found.stdout.splitlines()[-1])


def _show(page, script):
    from PySide6.QtCore import QTimer, QUrl
    from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineUrlRequestInterceptor
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    application = QApplication([])
    seen = {"messages": [], "dialogs": [], "requests": []}

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source):  # noqa: N802
            seen["messages"].append(message)

        def javaScriptAlert(self, origin, message):  # noqa: N802
            seen["dialogs"].append(message)

    class Requests(QWebEngineUrlRequestInterceptor):
        def interceptRequest(self, request):  # noqa: N802
            seen["requests"].append(request.requestUrl().toString())

    def answered(answer):
        if not answer:
            QTimer.singleShot(50, ask)
            return
        sys.stdout.write(json.dumps({**seen, **json.loads(answer), "title": shown.title()}) + "\n")
        sys.stdout.flush()
        os._exit(0)  # Qt may hang as it ends

    def ask():
        shown.runJavaScript("window.answer || ''", answered)

    profile, requests, view = QWebEngineProfile(), Requests(), QWebEngineView()
    profile.setUrlRequestInterceptor(requests)
    shown = Page(profile, view)
    view.setPage(shown)
    view.resize(1200, 900)
    view.show()
    shown.loadFinished.connect(lambda _: (shown.runJavaScript(RUN % script), ask()))
    shown.load(QUrl.fromLocalFile(os.path.abspath(page)))
    application.exec()


if __name__ == "__main__":
    _show(*sys.argv[1:])
