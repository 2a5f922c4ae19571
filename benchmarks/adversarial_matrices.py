"""Call every operator with ill-conditioned and invalid matrices: ``python -m benchmarks adversarial_matrices``.

The cases are those of ``tests/helpers/adversarial.py``; each is determined by its number and can be repeated:
``--only 1234``. An interrupted run resumes. 20,000 cases take half an hour on one processor, and half as long if gmpy2
is installed. The summary is ``benchmarks/results/adversarial_matrices.json``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
BAD = ("needless error", "unclear error", "silently wrong")
VERDICTS = ("exact", "undetermined", "clear error", *BAD)


def judge(task: tuple[int, int]) -> dict:
    """Judge one case; an exception of the suite itself is a separate verdict."""
    import torch

    from helpers import adversarial

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        return adversarial.judge(*task)
    except Exception as error:
        case, _ = adversarial.make(*task)
        text = f"{type(error).__name__}: {error}"
        return {"number": task[1], "operator": case.row.name, "kind": case.draw.kind, "verdict": "crash", "error": text}


def processor() -> str:
    """The name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def summary(records: list[dict], seed: int, seconds: float | None, revision: str | None) -> dict:
    """Counts by operator and by kind, and every failed case."""
    import torch

    verdicts = [*VERDICTS, *({r["verdict"] for r in records} - set(VERDICTS))]

    def counts(rows: list[dict]) -> dict[str, int]:
        found = Counter(r["verdict"] for r in rows)
        return {v: found[v] for v in verdicts if found[v]}

    def by(key: str) -> dict[str, dict[str, int]]:
        return {name: counts([r for r in records if r[key] == name]) for name in sorted({r[key] for r in records})}

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "command": f"python -m benchmarks adversarial_matrices --cases {len(records)} --seed {seed}",
        "cases": len(records),
        "verdicts": counts(records),
        "revision": revision or git.stdout.strip(),
        "processor": processor(),
        "torch": torch.__version__,
        "seconds": None if seconds is None else round(seconds),  # of an uninterrupted run
        "of the exact": {rule: sum(rule in r for r in records) for rule in ("by its digits", "beyond the range")},
        "operators": by("operator"),
        "kinds": by("kind"),
        "to mend": [r for r in records if r["verdict"] in (*BAD, "crash")],
    }


def table(result: dict) -> str:
    """The counts by kind of matrix, and the command and revision, in Markdown."""
    lines = [f"| kind | {' | '.join(VERDICTS)} |", "| --- |" + " ---: |" * len(VERDICTS)]
    rows = [*result["kinds"].items(), ("**all**", result["verdicts"])]
    lines += [f"| {name} | {' | '.join(str(counts.get(v, 0)) for v in VERDICTS)} |" for name, counts in rows]
    made = f"`{result['command']}` at {result['revision']}, torch {result['torch']}, {result['processor']}."
    return "\n".join([*lines, "", made, ""])


def main() -> int:
    """Judge the cases and write the summary. Exit code 0 if every answer was right or refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--only", type=int, nargs="+", help="judge these cases and print their records")
    parser.add_argument("--revision", help="revision of the package, if git is not available")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "adversarial_matrices.json")
    options = parser.parse_args()
    if options.only:
        for number in options.only:
            print(json.dumps(judge((options.seed, number)), indent=2, ensure_ascii=False))
        return 0
    progress = options.output.with_suffix(f".{options.seed}.jsonl")
    done = {r["number"]: r for r in map(json.loads, progress.read_text().splitlines())} if progress.exists() else {}
    tasks = [(options.seed, n) for n in range(options.cases) if n not in done]
    started = time.perf_counter()
    with progress.open("a") as log, multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for record in pool.imap_unordered(judge, tasks, chunksize=20):
            done[record["number"]] = record
            log.write(json.dumps(record, ensure_ascii=False) + "\n")
            print(f"\r{len(done)} of {options.cases}", end="", file=sys.stderr)
    records = [done[n] for n in range(options.cases)]
    seconds = time.perf_counter() - started if len(tasks) == options.cases else None
    result = summary(records, options.seed, seconds, options.revision)
    options.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    progress.unlink()
    print(f"\n{result['verdicts']}: {options.output}")
    return 1 if result["to mend"] else 0
