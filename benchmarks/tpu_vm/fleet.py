"""A fleet of TPU VMs that answer a file of requests: create them, deal the file out, collect the answers, delete them.

    python benchmarks/tpu_vm/fleet.py create  --name trial --count 4 --zone us-east5-b --type v6e-8 --spot \
        --source 'jaxserve[tpu] @ git+https://example.com/jaxserve'
    python benchmarks/tpu_vm/fleet.py start   --name trial --count 4 --zone us-east5-b requests.jsonl \
        --model meta-llama/Llama-3.1-8B-Instruct -- --tensor-parallel-size 8
    python benchmarks/tpu_vm/fleet.py collect --name trial --count 4 --zone us-east5-b requests.jsonl answers.jsonl
    python benchmarks/tpu_vm/fleet.py delete  --name trial --count 4 --zone us-east5-b

`--dry-run` prints the commands and runs none. `gcloud` must be installed and logged in. Each VM is one host with all of
its chips (v5litepod-1 to -8, v6e-1 to -8) and answers its own shard with `jaxserve batch`, which continues after an
interruption. Where a spot VM was lost, `create` and `start` it again with --only; `start` gives it the answers that
`collect` has saved, so that it does not repeat them. `collect` may be called while the VMs work; it exits with 3 while
answers are missing.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shards import ShardError, merge, split

# Images by the beginning of the accelerator's type, from Google's table of TPU software versions.
IMAGES = {"v5litepod-": "v2-alpha-tpuv5-lite", "v6e-": "v2-alpha-tpuv6e"}
PYTHON = "3.12"
MOST_CHIPS = 8  # of one host
MISSING = 3  # exit status: not all requests have an answer
FOLDER = "jaxserve-batch"  # in the home of each VM


class FleetError(ValueError):
    """Arguments with which no VM should be started. The message has the reason."""


class Fleet(NamedTuple):
    """VMs name-0, name-1, … of one zone. `only`: the numbers of those that are created, started or deleted. `work`: the
    local folder with their shards and answers."""

    name: str
    count: int
    only: Sequence[int]
    zone: str
    project: str | None
    work: Path
    dry_run: bool

    def run(self, verb: str, *arguments: str, check: bool = True) -> int:
        """Runs `gcloud compute tpus tpu-vm VERB …`, or prints it. Returns the exit status."""
        command = ["gcloud", "compute", "tpus", "tpu-vm", verb, *arguments, "--zone", self.zone]
        command += ["--project", self.project] if self.project else []
        if self.dry_run:
            print(shlex.join(command))
            return 0
        return subprocess.run(command, check=check).returncode

    def vm(self, i: int) -> str:
        return f"{self.name}-{i}"

    def shard(self, i: int) -> Path:
        return self.work / f"shard-{i}.jsonl"

    def answers(self, i: int) -> Path:
        return self.work / f"answers-{i}.jsonl"


def create(fleet: Fleet, kind: str, spot: bool, source: str) -> None:
    """Creates the VMs and installs jaxserve from `source`, a requirement for pip, on each."""
    image = next((image for prefix, image in IMAGES.items() if kind.startswith(prefix)), None)
    if image is None or not 1 <= int(kind.rsplit("-", 1)[1]) <= MOST_CHIPS:
        raise FleetError(f"--type must be one host, {' or '.join(IMAGES)} with 1 to {MOST_CHIPS} chips, not {kind}")
    # The images have Python 3.10, without venv. uv brings a newer one.
    install = (
        "python3 -m pip install --quiet --user uv && "
        f"python3 -m uv venv --quiet --python {PYTHON} ~/jaxserve && "
        f"python3 -m uv pip install --quiet --python ~/jaxserve/bin/python {shlex.quote(source)}"
    )
    for vm in map(fleet.vm, fleet.only):
        fleet.run("create", vm, "--accelerator-type", kind, "--version", image, *(["--spot"] if spot else []))
        fleet.run("ssh", vm, "--command", f"{install} && mkdir -p {FOLDER}")


def start(fleet: Fleet, requests: Path, model: str, flags: Sequence[str]) -> None:
    """Deals the requests out and starts `jaxserve batch` on each VM, which goes on when the connection ends."""
    fleet.work.mkdir(parents=True, exist_ok=True)
    split(requests, [fleet.shard(i) for i in range(fleet.count)])
    batch = f"exec ~/jaxserve/bin/jaxserve batch shard.jsonl answers.jsonl --model {shlex.join([model, *flags])}"
    # A run that still goes on must not get a second one beside it, which would write to the same file.
    alone = f"flock --nonblock batch.lock bash -c {shlex.quote(batch)}"
    command = f"cd {FOLDER} && (nohup {alone} > batch.log 2>&1 < /dev/null &)"
    for i in fleet.only:
        vm = fleet.vm(i)
        fleet.run("scp", str(fleet.shard(i)), f"{vm}:{FOLDER}/shard.jsonl")
        if fleet.answers(i).exists():
            _give_back(fleet, i, vm)
        fleet.run("ssh", vm, "--command", command)


def _give_back(fleet: Fleet, i: int, vm: str) -> None:
    """Gives a VM the answers that were collected from the one before it, unless it has some of its own."""
    fleet.run("scp", str(fleet.answers(i)), f"{vm}:{FOLDER}/collected.jsonl")
    fleet.run("ssh", vm, "--command", f"cd {FOLDER} && cp --no-clobber collected.jsonl answers.jsonl")


def collect(fleet: Fleet, requests: Path, output: Path) -> list[str]:
    """Copies what each VM has answered so far, and merges it. A VM that cannot be reached keeps what it gave before.
    Returns the custom_ids without an answer."""
    fleet.work.mkdir(parents=True, exist_ok=True)
    for i in range(fleet.count):
        new = fleet.answers(i).with_suffix(".new")
        if fleet.run("scp", f"{fleet.vm(i)}:{FOLDER}/answers.jsonl", str(new), check=False) == 0 and new.exists():
            new.replace(fleet.answers(i))
    if fleet.dry_run:
        return []
    return merge(requests, [fleet.answers(i) for i in range(fleet.count)], output)


def delete(fleet: Fleet) -> None:
    for vm in map(fleet.vm, fleet.only):
        fleet.run("delete", vm, "--quiet")


def main(arguments: Sequence[str] | None = None) -> int:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--name", required=True, help="the VMs are NAME-0, NAME-1, …")
    common.add_argument("--count", type=int, default=1, help="how many VMs (default: 1)")
    common.add_argument("--only", type=int, metavar="N", help="only NAME-N, such as a spot VM that was lost")
    common.add_argument("--zone", required=True)
    common.add_argument("--project", help="default: gcloud's")
    common.add_argument("--work", type=Path, help="folder for shards and answers (default: tpu-vm-NAME)")
    common.add_argument("--dry-run", action="store_true", help="print the commands, and run none")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("create", parents=[common], help="create the VMs, and install jaxserve on them")
    one.add_argument("--type", required=True, help="such as v6e-8 or v5litepod-8")
    one.add_argument("--spot", action="store_true", help="cheaper, and may be lost at any time")
    one.add_argument("--source", required=True, help="what pip installs, such as 'jaxserve[tpu] @ git+https://…'")
    about = "deal out the requests, and start answering them; flags of `jaxserve batch` come after --"
    one = verbs.add_parser("start", parents=[common], help=about)
    one.add_argument("requests", type=Path)
    one.add_argument("--model", required=True)
    one = verbs.add_parser("collect", parents=[common], help="fetch the answers, and merge them")
    one.add_argument("requests", type=Path)
    one.add_argument("output", type=Path)
    verbs.add_parser("delete", parents=[common], help="delete the VMs")
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:at])
    work = args.work or Path(f"tpu-vm-{args.name}")
    only = range(args.count) if args.only is None else [args.only]
    fleet = Fleet(args.name, args.count, only, args.zone, args.project, work, args.dry_run)
    try:
        if not all(0 <= i < args.count for i in only) or args.count < 1:
            raise FleetError(f"there must be VMs 0 to --count - 1, not --count {args.count} and --only {args.only}")
        if args.verb == "create":
            create(fleet, args.type, args.spot, args.source)
        elif args.verb == "start":
            start(fleet, args.requests, args.model, given[at + 1 :])
        elif args.verb == "delete":
            delete(fleet)
        elif missing := collect(fleet, args.requests, args.output):
            print(f"{len(missing)} requests have no answer yet, {missing[0]!r} first", file=sys.stderr)
            return MISSING
    except (FleetError, ShardError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"error: exit status {error.returncode} of {shlex.join(error.cmd)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
