"""Checks in a browser the pages that `kvferry run --html` writes and the status page: their text, and that something is drawn."""

import collections
import html
import json
import os
import pathlib
import re
import struct
import subprocess
import tempfile
import unittest
import urllib.error
import urllib.request
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[3]
WIDTH, HEIGHT = 1500, 900
# Colours of the page, see page.html.
MESSAGE, LANDING, FAULT, VIOLATION, CHOSEN = "41586f", "1f8a4c", "e07b00", "f9d6d3", "ffe066"
LOST, LED = "b3261e", "fff3bf"
COMPUTED, DECODING, PRESSED = "5b8def", "b89bd9", "2f4a66"
# Pixels of each that the legend does not have.
LEAST = {MESSAGE: 300, LANDING: 400, FAULT: 90, VIOLATION: 2000, CHOSEN: 5000, LOST: 20, LED: 2000,
         COMPUTED: 400, DECODING: 400, PRESSED: 200}


def pixels(png: bytes) -> collections.Counter:
    """How often each colour is in a picture of 8 bits per sample, as Chromium writes them."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n", "it is no PNG"
    at, data, header = 8, b"", None
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            header = struct.unpack(">IIBBBBB", body)
        elif kind == b"IDAT":
            data += body
        at += 12 + length
    width, height, depth, colour, _, _, interlaced = header
    assert (width, height, depth, interlaced) == (WIDTH, HEIGHT, 8, 0), header
    size = {2: 3, 6: 4}[colour]
    raw, before, colours = zlib.decompress(data), bytearray(width * size), collections.Counter()
    for row in range(height):
        start = row * (width * size + 1)
        line = unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + width * size]), before, size)
        colours.update(line[x : x + 3].hex() for x in range(0, len(line), size))
        before = line
    return colours


def unfiltered(kind: int, line: bytearray, above: bytearray, size: int) -> bytearray:
    """A row of a PNG without its filter (https://www.w3.org/TR/png-3/#9Filter-types)."""
    for x in range(len(line)):
        left, up = line[x - size] if x >= size else 0, above[x]
        if kind == 1:
            line[x] = (line[x] + left) & 255
        elif kind == 2:
            line[x] = (line[x] + up) & 255
        elif kind == 3:
            line[x] = (line[x] + (left + up) // 2) & 255
        elif kind == 4:
            corner = above[x - size] if x >= size else 0
            guess = left + up - corner
            near = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))
            line[x] = (line[x] + near[2]) & 255
    return line


class Pages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="kvferry-pictures-")
        cls.addClassCleanup(cls.folder.cleanup)

    def page(self, scenario: str, *options: str) -> pathlib.Path:
        path = pathlib.Path(self.folder.name) / f"{self.id()}.html"
        command = [os.environ["KVFERRY"], "run", ROOT / "scenarios" / scenario, "--html", path, *options]
        subprocess.run(command, check=True, capture_output=True)
        return path

    def browser(self, page: str, *options: str) -> bytes:
        profile = tempfile.mkdtemp(dir=self.folder.name)
        # Nothing of the page is from elsewhere, so the sandbox keeps nothing out; root cannot have one.
        fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        fixed += [f"--window-size={WIDTH},{HEIGHT}", "--force-device-scale-factor=1", "--virtual-time-budget=5000"]
        command = [os.environ["CHROMIUM"], *fixed, *options, page]
        return subprocess.run(command, check=True, capture_output=True).stdout

    def text(self, page: pathlib.Path | str, place: str = "") -> str:
        """What stands on a page once its script has run, without its data and code."""
        url = page if isinstance(page, str) else page.as_uri() + place
        dom = self.browser(url, "--dump-dom").decode()
        dom = re.sub(r"<(script|style|title)\b.*?</\1>", "", dom, flags=re.DOTALL)
        return html.unescape(re.sub(r"<[^>]*>", "\n", dom))

    def colours(self, page: pathlib.Path, place: str = "") -> collections.Counter:
        shot = page.with_suffix(".png")
        self.browser(page.as_uri() + place, f"--screenshot={shot}")
        colours = pixels(shot.read_bytes())
        keep = os.environ.get("KVFERRY_PICTURES")
        if keep:
            pathlib.Path(keep, f"{self.id()}.png").write_bytes(shot.read_bytes())
        return colours

    def drawn(self, colours: collections.Counter, *wanted: str):
        for colour in wanted:
            self.assertGreater(colours[colour], LEAST[colour], f"too little of #{colour}: {colours.most_common(12)}")

    def test_a_failing_run_shows_its_violation_and_what_led_to_it(self):
        page = self.page("faults/no-copy.toml")
        text = self.text(page, "#sequence")
        for told in ["correctness", "uses wrong KV", "I1-no-foreign-bytes", "What led to it", "fabric.no_copy",
                     "d0 rank 0", "blocks land", "group 0: "]:
            self.assertIn(told, text)
        self.drawn(self.colours(page, "#sequence"), MESSAGE, LANDING, VIOLATION, CHOSEN, LED)

    def test_a_run_that_held_shows_faults_and_lost_messages(self):
        page = self.page("faults/mixed.toml")
        data = re.search(r'type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)[1]
        data = json.loads(data)
        kinds = [data["kinds"][event[2]] for event in data["events"]]
        labels = [data["labels"][event[9]] for event in data["events"]]
        loss = next(at for at, kind in enumerate(kinds) if kind == "fault" and labels[at] == "wire.loss")
        text = self.text(page, f"#event={loss}&minor")
        for told in ["held", "wire.loss", "77 fault hits", "Blocks"]:
            self.assertIn(told, text)
        self.drawn(self.colours(page, f"#event={loss}&minor"), MESSAGE, FAULT, LOST, CHOSEN)

        # One transfer: those of others have no row.
        landing = next(at for at, kind in enumerate(kinds) if kind == "landing")
        transfer = data["events"][landing][8][0]
        text = self.text(page, f"#event={landing}&transfer={transfer}")
        self.assertIn("filtered out", text)
        self.assertIn(data["transfers"][transfer], text)
        self.drawn(self.colours(page, f"#event={landing}&transfer={transfer}"), MESSAGE, LANDING, CHOSEN)

    def test_the_overview_shows_each_request_and_leads_to_its_messages(self):
        page = self.page("smoke/push.toml")
        text = self.text(page)
        for told in ["handed over", "client 23", "p0 to d0", "p50", "at the first transfer: Dispatch", "longest are"]:
            self.assertIn(told, text)
        self.drawn(self.colours(page), LANDING, COMPUTED, DECODING, PRESSED)

        # A click on the bar of a request: its messages, and those of no other.
        clicked = page.with_name("clicked.html")
        click = '<script>document.querySelectorAll("#requests .bar")[3].dispatchEvent(new MouseEvent("click"));</script>'
        clicked.write_text(page.read_text().replace("</html>", click + "</html>"))
        text = self.text(clicked)
        for told in ["client 3 asks", "filtered out", "What comes of it"]:
            self.assertIn(told, text)
        self.drawn(self.colours(clicked), MESSAGE, LANDING, CHOSEN)

    def test_the_status_page_says_the_word_of_readiness(self):
        command = [os.environ["KVFERRY"], "router", "--json"]
        for option in ["--listen", "--admin-addr", "--discovery"]:
            command += [option, "127.0.0.1:0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as router:
            self.addCleanup(router.kill)
            line = json.loads(router.stdout.readline())
            completions = f"http://{line['http']}/v1/completions"
            request = urllib.request.Request(completions, b"{}", {"content-type": "application/json"})
            with self.assertRaises(urllib.error.HTTPError):
                urllib.request.urlopen(request, timeout=60)
            text = self.text(f"http://{line['admin']}/")
            router.kill()
        for told in ["no pair", "0 prefills and 0 decodes can serve now", "answers, 4xx", "answers, 5xx"]:
            self.assertIn(told, text)
        counts = re.sub(r"\s+", " ", text)
        self.assertIn("answers, 4xx 1", counts)


if __name__ == "__main__":
    unittest.main()
