"""Python imports this at its start where this folder is on PYTHONPATH: notes which functions of the project a process
runs while the file TRACE_FLAG exists, and writes them beside it when the file goes, as [file, name, line]."""

import json
import os
import sys
import threading
import time
from pathlib import Path

FLAG = Path(os.environ["TRACE_FLAG"])
ROOT = os.environ["TRACE_ROOT"]
seen = set()
recording = False


def profile(frame, event, argument):
    if recording and event == "call":
        seen.add(frame.f_code)


def follow_flag():
    global recording
    while True:
        wanted = FLAG.exists()
        if recording and not wanted:
            found = [(code.co_filename, code.co_qualname, code.co_firstlineno) for code in list(seen)]
            found = [row for row in found if os.path.realpath(row[0]).startswith(ROOT)]
            written = FLAG.with_suffix(f".{os.getpid()}.part")
            written.write_text(json.dumps(found))
            written.rename(written.with_suffix(".json"))
            seen.clear()
        recording = wanted
        time.sleep(0.02)


sys.setprofile(profile)
threading.setprofile(profile)
threading.Thread(target=follow_flag, daemon=True).start()
