"""The page in a browser: upload, drag, keys, clicks, export, a telephone."""

import io
import re
import shutil
import zipfile

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("gradio")
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from matbackprop.vision.serve.analysis import analyze  # noqa: E402
from matbackprop.vision.serve.app import application, build  # noqa: E402
from matbackprop.vision.serve.server import Server, listen  # noqa: E402

api.expect.set_options(timeout=60_000)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium or Chrome on this machine"),
    pytest.mark.filterwarnings("ignore"),  # of Gradio's server and its threads
]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    with listen("127.0.0.1", 0) as sock:
        server = Server(application(build(lambda pixels, name: analyze(pixels, name=name), folder)), sock, folder)
        server.start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.close()


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """Open the page as a new visitor, of a width and height, and wait for the first sample's regions."""
    contexts, troubles = [], []

    def visit(width=1280, height=900):
        context = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True)
        context.set_default_timeout(120_000)  # generous, for busy machines
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(address)
        page.wait_for_selector(".stage:not(.empty) .caption:not(:empty)")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not troubles


def quarters():
    image = np.full((240, 320, 3), 30, np.uint8)
    image[:, 160:] = (220, 120, 20)
    image[120:, 160:] = (40, 60, 220)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def upload(page, *files):
    page.locator("#drop input[type=file]").set_input_files(
        [{"name": name, "mimeType": "image/png", "buffer": content} for name, content in files]
    )


def regions(page):
    """The number of regions in the caption, with the pointer elsewhere."""
    return int(re.match(r"(\d+) region", page.locator(".caption").inner_text())[1])


def shows(page, count):
    api.expect(page.locator(".caption")).to_have_text(f"{count} region{'s' * (count != 1)}")


def click_region(page, x, y):
    """Click at fractions of the picture's width and height, and move the pointer away."""
    box = page.locator(".stage .picture").bounding_box()
    page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])
    page.mouse.move(5, 5)


def slide(page, height, count):
    """Set the slider and wait until the caption shows ``count`` regions."""
    page.locator("#height input[type=number]").fill(str(height))
    page.keyboard.press("Enter")
    shows(page, count)


def exported(page, kind):
    page.locator("#format input").click()
    page.get_by_role("option", name=kind).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    return download.value


def test_photographs_are_uploaded_edited_and_exported_under_their_names(visit):
    page = visit()
    upload(page, ("mug.png", quarters()), ("second.png", quarters()))
    api.expect(page.locator(".stage img")).to_have_attribute("alt", re.compile("^mug.png divided into"))
    assert [label.strip() for label in page.locator("#strip .caption-label").all_inner_texts()][:2] == [
        "mug.png",
        "second.png",
    ]
    slide(page, 1, 1)
    click_region(page, 0.75, 0.25)
    shows(page, 2)
    page.get_by_label("name", exact=True).check()
    page.get_by_label("Name", exact=True).fill("the sky")
    click_region(page, 0.9, 0.9)
    box = page.locator(".stage .picture").bounding_box()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.9 * box["height"])
    api.expect(page.locator(".caption")).to_contain_text("“the sky”")
    page.mouse.move(5, 5)
    slide(page, 0, 3)
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.9 * box["height"])
    api.expect(page.locator(".caption")).to_contain_text("“the sky”")  # the slider keeps edits and names
    page.mouse.move(5, 5)

    file = exported(page, "COCO masks")
    assert file.suggested_filename == "mug-coco.json"
    with open(file.path()) as content:
        assert "the sky" in content.read()
    file = exported(page, "PNG images")
    assert file.suggested_filename == "mug.zip"
    with zipfile.ZipFile(file.path()) as archive:
        assert all(name.startswith("mug") for name in archive.namelist())

    slide(page, 1, 2)
    for _ in range(2):  # the name and the split, without waiting
        page.get_by_role("button", name="Undo").click()
    page.mouse.move(5, 5)
    shows(page, 1)
    page.locator("#strip button").nth(1).click()
    api.expect(page.locator(".stage img")).to_have_attribute("alt", re.compile("^second.png divided into"))


def test_regions_change_while_the_slider_is_dragged_and_by_keys(visit):
    page = visit()
    slider = page.locator("#height input[type=range]")
    slide(page, 1, 1)
    box = slider.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.05, box["y"] + box["height"] / 2, steps=6)
    page.wait_for_function("parseInt(document.querySelector('.caption').innerText) > 12")  # the button is down
    page.mouse.up()
    slider.focus()
    page.keyboard.press("End")
    shows(page, 1)


def test_quick_clicks_count_one_by_one(visit):
    page = visit()
    slide(page, 1, 1)
    undo = page.get_by_role("button", name="Undo")
    for _ in range(4):
        for _ in range(3):
            click_region(page, 0.5, 0.5)
        shows(page, 4)
        for _ in range(3):
            undo.click()
        page.mouse.move(5, 5)
        shows(page, 1)


def test_three_views_are_three_pictures(visit):
    page = visit()
    photograph = page.locator(".stage img").get_attribute("src")
    pictures = {photograph}
    for view in ("contours", "heights"):
        page.get_by_label(view, exact=True).check()
        api.expect(page.locator(".stage img")).to_have_attribute("src", re.compile("^data:image/png"))
        pictures.add(page.locator(".stage img").get_attribute("src"))
    assert len(pictures) >= 2
    page.get_by_label("regions", exact=True).check()
    api.expect(page.locator(".stage img")).to_have_attribute("src", photograph)


def test_photograph_and_slider_are_above_the_fold(visit):
    page = visit(1280, 860)
    for place in (".stage .picture", "#height"):
        box = page.locator(place).bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= 860


def test_the_pointer_outlines_a_region_and_keys_act_like_clicks(visit):
    page = visit()
    slide(page, 1, 1)
    orange = """() => {
      const c = document.querySelector(".stage canvas");
      const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
      let n = 0;
      for (let i = 0; i < d.length; i += 4) n += d[i] === 255 && d[i + 1] === 90 && d[i + 2] === 0;
      return n;
    }"""
    assert page.evaluate(orange) == 0
    page.locator(".stage .picture").hover()
    api.expect(page.locator(".caption")).to_contain_text("of 1 region")
    assert page.evaluate(orange) > 100
    page.mouse.move(5, 5)
    assert page.evaluate(orange) == 0
    page.locator(".stage .picture").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    api.expect(page.locator(".caption")).to_contain_text("of 2 regions")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_cut_off_and_every_picture_has_an_alt_text(visit, width):
    page = visit(width, 844)
    page.wait_for_selector(".stage canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    words = page.evaluate(
        """[...document.querySelectorAll('img:not([alt=""]), [role=img]')].map(
             (e) => e.getAttribute("alt") ?? e.getAttribute("aria-label"))"""
    )
    assert len(words) > 4 and all(words)
