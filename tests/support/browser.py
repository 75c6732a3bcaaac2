"""A headless Chromium, driven by WebDriver's HTTP protocol."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx2 as httpx
from ports import free_port
from waiting import wait_until

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for an element's id
DELETE = "\ue017"  # the key, in WebDriver


def has_chromium() -> bool:
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


class Browser:
    """One Chromium with its driver; the tests of a file share it."""

    def __init__(self) -> None:
        port = free_port()
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._profile.name},
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
        wait_until(self._is_up, timeout_s=30)
        arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--lang=en-US"]
        arguments.append("--hide-scrollbars")  # which a screenshot would have room for, not show
        arguments.append(
            "--host-resolver-rules=MAP *.test 127.0.0.1"
        )  # a domain reserved for tests
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # Chromium refuses to start as root with it
        options = {"args": [*arguments, f"--user-data-dir={self._profile.name}/profile"]}
        wanted = {
            "browserName": "chrome",
            "acceptInsecureCerts": True,  # of proxies in tests
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = self._http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
        assert made.status_code == 200, made.text
        self._session = f"/session/{made.json()['value']['sessionId']}"

    def _is_up(self) -> bool:
        try:
            ready: bool = self._http.get("/status").json()["value"]["ready"]
        except httpx.HTTPError:
            return False
        return ready

    def close(self) -> None:
        self._http.delete(self._session)
        self._http.close()
        self._driver.terminate()
        self._driver.wait(10)
        self._profile.cleanup()

    def _call(self, path: str, **body: Any) -> Any:
        done = self._http.post(f"{self._session}/{path}", json=body)
        value = done.json()["value"]
        if done.status_code != 200:
            raise BrowserError(f"{value['error']}: {value['message']}")
        return value

    def open(self, url: str) -> None:
        self._call("url", url=url)

    def js(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page and return its value."""
        return self._call("execute/sync", script=script, args=list(arguments))

    def wait(self, script: str, *arguments: Any, timeout_s: float = 20) -> Any:
        """Wait until an expression in the page is true; return its value."""
        return wait_until(lambda: self.js(f"return {script}", *arguments), timeout_s=timeout_s)

    def text(self) -> str:
        """The text that the page shows."""
        found: str = self.js("return document.body.innerText")
        return found

    def wait_for(self, text: str, *, timeout_s: float = 20) -> None:
        """Wait until the page shows a text."""
        wait_until(lambda: text in self.text(), timeout_s=timeout_s)

    def find(self, selector: str) -> str:
        """Wait for the element that a CSS selector names; return its id."""
        self.wait("document.querySelector(arguments[0]) !== null", selector)
        found: str = self._call("element", using="css selector", value=selector)[_ELEMENT]
        return found

    def click(self, selector: str) -> None:
        """Click an element as a user does: it must be visible and not covered."""
        self._click(self.find(selector))

    def _click(self, element: str) -> None:
        # A part of the page that stays in view may be over what is at its edge.
        self.js("arguments[0].scrollIntoView({block: 'center'})", {_ELEMENT: element})
        self._call(f"element/{element}/click")

    def press(self, text: str) -> None:
        """Click the button with this text or label, in the open dialog where there is one."""
        script = (
            "const root = document.querySelector('dialog[open]') ?? document;"
            "const all = [...root.querySelectorAll('button')];"
            "return all.find((b) => b.checkVisibility()"
            " && [b.innerText.trim(), b.ariaLabel].includes(arguments[0]))"
        )
        found = wait_until(lambda: self.js(script, text))
        self._click(found[_ELEMENT])

    def press_summary(self, text: str) -> None:
        """Open or close the part of the page with this heading."""
        script = (
            "return [...document.querySelectorAll('summary')]"
            ".find((one) => one.innerText.trim() === arguments[0])"
        )
        found = wait_until(lambda: self.js(script, text))
        self._click(found[_ELEMENT])

    def type(self, selector: str, text: str) -> None:
        """Replace the text of an input, as a user does: select it, and type or delete."""
        element = self.find(selector)
        self.js(
            "const one = document.querySelector(arguments[0]); one.focus(); one.select()", selector
        )
        self._call(f"element/{element}/value", text=text or DELETE)

    def upload(self, selector: str, path: Path) -> None:
        """Choose a file in a file input."""
        self._call(f"element/{self.find(selector)}/value", text=str(path))

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select, as a user's choice is reported."""
        self.find(selector)
        self.js(
            "const [at, value] = arguments; const one = document.querySelector(at);"
            "one.value = value; one.dispatchEvent(new Event('change', {bubbles: true}))",
            selector,
            value,
        )

    def keys(self, *keys: str) -> None:
        """Press keys on the element that has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size of the page, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", **metrics)

    def cdp(self, command: str, **parameters: Any) -> Any:
        """Send a command of Chromium's own protocol."""
        return self._call("goog/cdp/execute", cmd=command, params=parameters)

    def screenshot(self, path: Path) -> None:
        """Write the whole page, also what is below the window, as a PNG file."""
        taken = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def new_tab(self) -> str:
        handle: str = self._call("window/new", type="tab")["handle"]
        return handle

    def new_window(self) -> str:
        """Open a window, whose page is visible next to those of other windows."""
        handle: str = self._call("window/new", type="window")["handle"]
        return handle

    def tab(self) -> str:
        handle: str = self._http.get(f"{self._session}/window").json()["value"]
        return handle

    def switch(self, tab: str) -> None:
        self._call("window", handle=tab)

    def close_tab(self) -> None:
        self._http.delete(f"{self._session}/window")

    def cookies(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._http.get(f"{self._session}/cookie").json()["value"]
        return found

    def save_downloads(self, folder: Path) -> None:
        """Save downloads in a folder, without a dialog."""
        self.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def problems(self) -> list[str]:
        """What the console has reported since the last call: errors and refusals by the CSP."""
        entries = self._call("se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def axe(self) -> list[str]:
        """The violations of accessibility rules that axe-core finds in the page."""
        # By the debugger's protocol, which the page's CSP does not apply to.
        self.cdp("Runtime.evaluate", expression=AXE.read_text())
        self.js("window.found = null; axe.run().then((found) => { window.found = found })")
        found = self.wait("window.found", timeout_s=60)
        return [
            f"{one['id']}: {node['target']}" for one in found["violations"] for node in one["nodes"]
        ]


class BrowserError(Exception):
    """The driver refused a command."""
