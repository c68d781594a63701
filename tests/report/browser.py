"""A headless Chromium, controlled by DevTools messages over a pipe: JSON, each followed by a zero byte.

python tests/report/browser.py page.html docs     two screenshots: docs/page.png and docs/page-phone.png
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-background-networking --disable-dev-shm-usage "
    "--hide-scrollbars --no-first-run --remote-debugging-pipe"
)


class Browser:
    def __init__(self, page: Path, profile: Path, width: int = 1100, height: int = 900) -> None:
        down, self._write = os.pipe()
        self._read, up = os.pipe()
        # Chromium reads from 3 and writes to 4.
        command = f'exec "{CHROMIUM}" {FLAGS} --user-data-dir="{profile}" 3<&{down} 4>&{up}'
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(down, up), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(down)
        os.close(up)
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Page.navigate", url=page.as_uri())
        while self.run("document.readyState") != "complete":
            pass

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression. AssertionError if it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait two frames, until everything is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of the first matching element."""
        x, y = self.middle(selector)
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def wait_for(self, expression: str, seconds: float = 10) -> None:
        """Wait until the expression is true: on a busy machine an event takes effect some frames later."""
        end = time.monotonic() + seconds
        while not self.run(expression):
            assert time.monotonic() < end, f"not true after {seconds} s: {expression}"
            self.settle()

    def middle(self, selector: str) -> tuple[float, float]:
        """Where the middle of the first matching element is, after it was scrolled into view and drawn there."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.settle()
        x, y, width, height = self.run(
            f"(b => [b.x, b.y, b.width, b.height])({found}.getBoundingClientRect())"
        )
        return x + width / 2, y + height / 2

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.settle()

    def picture(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(shot))

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            piece = os.read(self._read, 1 << 16)
            if not piece:
                raise AssertionError("Chromium ended.")
            self._pending += piece
        raw, self._pending = self._pending.split(b"\0", 1)
        return dict(json.loads(raw))

    def _note(self, event: dict[str, Any]) -> None:
        method, given = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(given["exceptionDetails"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(given["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.errors.append(str(given["args"]))


def pictures(page: Path, folder: Path) -> None:
    """Screenshots of a light desktop and a dark phone, each with the mouse on the curves."""
    with tempfile.TemporaryDirectory() as profile:
        window = Browser(page, Path(profile))
        for name, width, height, scheme in (("page", 1200, 900, "light"), ("page-phone", 390, 844, "dark")):
            window.resize(width, height)
            window.prefer(scheme)
            x, y = window.middle("#chart svg")
            window.move(x + width / 10, y)
            window.picture(folder / f"{name}.png")
        window.close()


if __name__ == "__main__":
    pictures(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
