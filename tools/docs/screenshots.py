"""Pictures of the page for the docs: a real job with a slow worker and a checkpoint now and then, in a real Chromium.

`make screenshots` calls it: python tools/docs/screenshots.py docs/images
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from playwright.sync_api import sync_playwright

SCRIPT = """
import time, torch, syncline
from syncline.torch import DataLoader, DistributedOptimizer

job = syncline.init()
torch.manual_seed(0)
x = torch.randn(20_000, 32)
data = torch.utils.data.TensorDataset(x, (x[:, :4].sum(1) > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))
opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model=model)
loader = DataLoader(data, batch_size=32, shuffle=True)
for epoch in range(1_000):
    for features, labels in loader:
        time.sleep(0.25 if job.name == "worker-2" else 0.07)  # stands for the work of a larger model
        out = model(features)
        loss = torch.nn.functional.cross_entropy(out, labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        job.report(loss=loss, accuracy=(out.argmax(1) == labels).float().mean())
"""
OPTIONS = (
    "-w", "4", "-s", "2", "--replicas", "2", "--checkpoint", "checkpoints", "--save-every", "150steps",
    "--start-seconds", "600",
)  # fmt: skip
SECONDS = 600.0
#: Name of a picture -> size and colours.
PICTURES = {
    "page-light": ((1280, 1150), "light"),
    "page-phone-dark": ((390, 844), "dark"),
}


def main(folder: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        (pathlib.Path(place) / "train.py").write_text(SCRIPT)
        log = pathlib.Path(place) / "out.txt"
        words = [sys.executable, "-m", "syncline", "run", "--name", "lenet-demo", *OPTIONS, "train.py"]
        with open(log, "wb") as out:
            job = subprocess.Popen(words, cwd=place, stdout=out, stderr=out)
        try:
            link = wait_for(log, r"the page: (http://\S+)")
            take(folder, link)
            runs = pathlib.Path(place) / "runs"
            script = pathlib.Path(__file__).with_name("top_picture.py")
            words = [sys.executable, script, "lenet-demo", runs, folder / "top.png"]
            subprocess.run([str(word) for word in words], check=True)
        finally:
            job.terminate()
            job.wait(SECONDS)
    # The page of a served model.
    subprocess.run([sys.executable, pathlib.Path(__file__).with_name("serve_picture.py"), folder], check=True)


def wait_for(log: pathlib.Path, pattern: str) -> str:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        if found := re.search(pattern, log.read_text()):
            return found[1]
        time.sleep(0.2)
    raise SystemExit(log.read_text())


def take(folder: pathlib.Path, link: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        state, address = None, link
        for name, (size, colours) in PICTURES.items():
            width, height = size
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=colours, storage_state=state
            )
            page = context.new_page()
            page.goto(address)
            page.wait_for_selector("body[data-ready]", timeout=1e3 * SECONDS)
            until = time.monotonic() + SECONDS
            while page.locator("#event-list .kind.checkpoint").count() < 2 and time.monotonic() < until:
                time.sleep(0.5)
            time.sleep(2.0)  # one more look, and its charts
            page.wait_for_selector(".notice:has-text('straggler')", timeout=1e3 * SECONDS)
            page.screenshot(path=str(folder / f"{name}.png"))
            state, address = context.storage_state(), link.partition("/open")[0] + "/"
            context.close()
        browser.close()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
