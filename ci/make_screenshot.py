"""Take the picture of the Ray dashboard's Actors page while the smoke run trains.

    bash ci/browser.sh
    python ci/make_screenshot.py

Launches the notebook's own run, opens the dashboard in headless Chromium, and writes
images/dashboard.png. Put the date of the run under it in docs/guide.md.
"""

import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["JAX_PLATFORMS"] = "cpu"  # as the notebook's own process

import ray
from notebook_module import load_notebook
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from trainkit.config import load_config

TOKEN = Path.home() / ".ray" / "auth_token"  # which the dashboard asks for


def main() -> None:
    os.chdir(ROOT)
    tutorial = load_notebook()
    runtime_env = {"py_modules": ["trainkit"]}
    context = ray.init(
        "local", runtime_env=runtime_env, num_cpus=2, log_to_driver=False
    )
    address = context.dashboard_url
    options = webdriver.ChromeOptions()
    for argument in ("headless", "no-sandbox", "disable-quic", "window-size=1900,640"):
        options.add_argument(f"--{argument}")
    with (
        tempfile.TemporaryDirectory() as folder,
        webdriver.Chrome(
            options, webdriver.ChromeService(shutil.which("chromedriver"))
        ) as browser,
    ):
        places = {"data_dir": f"{folder}/data", "storage_path": f"{folder}/runs"}
        config = load_config("configs/smoke.yaml", **places)
        tutorial.prepare_dataset(config)
        run = threading.Thread(target=tutorial.make_trainer(config).fit)
        run.start()
        log = config.run_path / "metrics.jsonl"
        while run.is_alive() and (not log.exists() or log.read_text().count("\n") < 4):
            time.sleep(1)
        browser.get(f"http://{address}/")
        browser.add_cookie(
            {"name": "ray-authentication-token", "value": TOKEN.read_text().strip()}
        )
        browser.get(f"http://{address}/#/actors")
        browser.refresh()
        field = (By.XPATH, "//label[.='Class']/following::input[1]")
        WebDriverWait(browser, 60).until(lambda b: b.find_elements(*field))
        browser.find_element(*field).send_keys("RayTrainWorker", Keys.ENTER)
        time.sleep(8)  # until the bars of processor and memory are drawn
        browser.save_screenshot(str(ROOT / "images/dashboard.png"))
        run.join()


if __name__ == "__main__":
    main()
