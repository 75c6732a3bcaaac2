"""Environments of MiniWoB++: a page in Debian's Chromium, as text or as a screenshot.

Needs the package `miniwob`, which warmd does not depend on. The column `task` of a record is the
name of the task, the seed determines the page. The reward is 1 for the page's success, else 0.
"""

# mypy: disable-error-code=import-not-found
# MiniWoB++ is in no environment of warmd's.

from __future__ import annotations

import atexit
import base64
import os
import re
from abc import ABC, abstractmethod
from io import BytesIO
from typing import Any

from miniwob.constants import TASK_HEIGHT, TASK_WIDTH, WEBDRIVER_SPECIAL_KEYS
from miniwob.dom import DOMElement
from miniwob.screenshot import get_screenshot
from miniwob.selenium_actions import (
    execute_click_coords,
    execute_click_element,
    execute_dblclick_coords,
    execute_mousedown_coords,
    execute_mouseup_coords,
    execute_move_coords,
    execute_press_key,
    execute_scroll_coords,
    execute_type_text,
)
from miniwob.selenium_instance import DEFAULT_BASE_URL, SeleniumInstance

# Without these Selenium would search for a browser, and download one.
os.environ.setdefault("MINIWOB_CHROME_BINARY", "/usr/bin/chromium")
os.environ.setdefault("MINIWOB_CHROMEDRIVER", "/usr/bin/chromedriver")

SCREEN = (TASK_WIDTH, TASK_HEIGHT)
SCROLLED = {"up": -50, "down": 50}  # pixels
MODIFIERS = {"ctrl": "C-", "shift": "S-", "alt": "A-"}
KEYS = {
    **{name.lower(): f"<{name}>" for name in ("Enter", "Tab", "Backspace", "Delete", "Space")},
    **{name.lower(): f"<{name}>" for name in ("Escape", "PageUp", "PageDown", "Home", "End")},
    **{name.lower(): f"<Arrow{name}>" for name in ("Up", "Down", "Left", "Right")},
}
# A page must not depend on the clock: by default an episode is lost after 10 s.
STILL = """
    core.EPISODE_MAX_TIME = 1e9;
    if (window.jQuery) jQuery.fx.off = true;
    document.head.insertAdjacentHTML("beforeend",
        "<style>* {caret-color: transparent !important; transition: none !important}</style>");
"""


class NoEffect(Exception):
    """An action that cannot be done; the message says why."""


class Browser(SeleniumInstance):  # type: ignore[misc]
    """A headless Chromium with its driver, which shows one page after another."""

    def __init__(self, task: str) -> None:
        super().__init__(0, task, headless=True)
        self.record_screenshots = False
        self.loaded = ""
        self.create_driver()

    def show(self, task: str, seed: int | None, *, afresh: bool) -> None:
        """Begin an episode; `afresh`: also load the document again if it is that of the task."""
        corner = (self.inner_width - 1, self.inner_height - 1)
        execute_move_coords(*corner, self.driver)  # a button below the mouse looks different
        url = f"{DEFAULT_BASE_URL}{task}.html"
        if afresh or url != self.loaded:
            self.driver.get(url)
            self.driver.execute_script(STILL)
            self.loaded = url
        self.force_stop()
        self.begin_task(seed)


class Pages(ABC):
    """What both environments have in common. The browser starts with the first episode."""

    browser: Browser | None = None
    loads_afresh = True  # a document that was used may differ, for example in what has the focus

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if self.browser is None:
            self.browser = Browser(options["task"])
            atexit.register(self.close)  # `close` is not called if the job has been killed
        self.is_over = False
        self.browser.show(options["task"], seed, afresh=self.loads_afresh)
        return self.seen(self.browser), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.browser is not None
        problem = ""
        try:
            self.act(self.browser, action)
        except NoEffect as error:
            problem = f"{error}\n"
        page = self.browser.get_metadata()
        is_over = page["done"] or self.is_over
        success = page["done"] and page["raw_reward"] > 0
        observation = "" if is_over else self.seen(self.browser, problem)
        return observation, float(success), is_over, False, {"success": success}

    def close(self) -> None:
        if self.browser is not None:
            self.browser.close()
            self.browser = None

    @abstractmethod
    def seen(self, browser: Browser, problem: str = "") -> Any:
        """Return the observation; `problem`: why the latest action had no effect."""

    @abstractmethod
    def act(self, browser: Browser, action: str) -> None:
        """Do an action. Raises NoEffect."""


class Text(Pages):
    """The instruction and the numbered elements; the first number of an action is clicked on."""

    loads_afresh = False  # it is three times as fast, and nothing that differs is in the text

    def seen(self, browser: Browser, problem: str = "") -> str:
        observation, info = browser.get_observation(use_cached_fields=True)
        found = [one for one in info["root_dom"].subtree_elements if is_clickable(one)]
        found.sort(key=lambda one: (one.top, one.left))  # as one reads, not as the page is written
        self.elements = {str(number): one.ref for number, one in enumerate(found, 1)}
        lines = [f"{number} {described(one)}\n" for number, one in enumerate(found, 1)]
        return f"{problem}{observation['utterance']}\n{''.join(lines)}"

    def act(self, browser: Browser, action: str) -> None:
        number = re.search("[0-9]+", action)
        if number is None or number[0] not in self.elements:
            raise NoEffect("no such number")
        execute_click_element(self.elements[number[0]], browser.driver)


def is_clickable(element: DOMElement) -> bool:
    kinds = ("a", "button", "select", "textarea")
    return element.tag in kinds or element.tag.startswith("input_") or "alink" in element.classes


def described(element: DOMElement) -> str:
    """Return the kind of an element, its text or that of its label, and what has been entered."""
    around = element if element.children or element.parent.tag != "label" else element.parent
    kind = {"span": "link", "a": "link"}.get(element.tag, element.tag.removeprefix("input_"))
    words = [kind, element.text, *(one.text for one in around.children if one.tag == "t")]
    words.append("checked" if element.value is True else element.value)
    return " ".join(dict.fromkeys(one for one in words if one))  # a textarea's value is its text


class Screens(Pages):
    """A screenshot of the task and its instruction; an action is UI-TARS's, also several."""

    def __init__(self) -> None:
        from warmd.jobs.models.gui_actions import read  # `Text` needs nothing of warmd

        self.read = read

    def seen(self, browser: Browser, problem: str = "") -> list[dict[str, Any]]:
        size = (browser.inner_width, browser.inner_height)
        image = BytesIO()
        get_screenshot(browser.driver, *size, *SCREEN).save(image, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}"
        observation, _ = browser.get_observation(use_cached_fields=True)
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": f"{problem}{observation['utterance']}"},
        ]
        return [{"role": "user", "content": content}]

    def act(self, browser: Browser, action: str) -> None:
        found = self.read(action, SCREEN)
        for one in found["actions"]:
            if self.is_over or browser.get_metadata()["done"]:
                return
            self.do(browser.driver, **one)
        if found["errors"]:
            raise NoEffect(found["errors"][0]["error"])

    def do(self, driver: Any, type: str, **given: Any) -> None:
        match type:
            case "click":
                execute_click_coords(*given["start"], driver)
            case "left_double":
                execute_dblclick_coords(*given["start"], driver)
            case "drag":
                execute_mousedown_coords(*given["start"], driver)
                execute_mouseup_coords(*given["end"], driver)
            case "type":
                text = given["content"].replace("\n", WEBDRIVER_SPECIAL_KEYS["<Enter>"])
                execute_type_text(text, driver)
            case "hotkey":
                execute_press_key(key_of(given["keys"]), driver)
            case "scroll" if given["direction"] in SCROLLED:
                x, y = given.get("start", (SCREEN[0] // 2, SCREEN[1] // 2))
                execute_scroll_coords(x, y, SCROLLED[given["direction"]], 0, driver)
            case "wait":
                pass
            case "finished":
                self.is_over = True
            case _:
                raise NoEffect(f"{type} cannot be done here")


def key_of(keys: list[str]) -> str:
    """Return MiniWoB's name of a key with modifiers. Raises NoEffect."""
    *modifiers, key = (one.lower() for one in keys)
    if not MODIFIERS.keys() >= set(modifiers) or (len(key) > 1 and key not in KEYS):
        raise NoEffect(f"there is no key {' '.join(keys)}")
    return "".join(MODIFIERS[one] for one in modifiers) + KEYS.get(key, key)
