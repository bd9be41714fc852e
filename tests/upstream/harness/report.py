"""Tallies of a sweep, as JSON and as the Markdown tables of the documentation."""

from __future__ import annotations

import collections
import json
import pathlib

# Order of the columns. "skipped" is an excluded or not reached check; "no_reference" fails on plain PyTorch too.
STATUSES = ("passed", "failed", "error", "crash", "hang", "skipped", "no_reference")
BAD = ("failed", "error", "crash", "hang")


def tally(results: list[dict]) -> dict:
    """Counts per database and check, plus the operators of which every check passes."""
    counts: dict[str, dict[str, collections.Counter]] = collections.defaultdict(
        lambda: collections.defaultdict(collections.Counter)
    )
    entries: dict[str, dict[str, set]] = collections.defaultdict(lambda: collections.defaultdict(set))
    for result in results:
        counter = counts[result["database"]][result["check"]]
        counter[result["status"]] += 1
        for field in ("bit_equal", "only_close", "own", "fallback", "compared"):
            counter[field] += result.get(field, 0)
        if result["status"] != "no_reference":
            entries[result["database"]][result["name"]].add(result["status"])
    return {
        "checks": {database: {check: dict(c) for check, c in checks.items()} for database, checks in counts.items()},
        "entries": {
            database: {"all pass": sum(found == {"passed"} for found in names.values()), "of": len(names)}
            for database, names in entries.items()
        },
    }


def bad(results: list[dict]) -> list[dict]:
    """The results that are failures."""
    return [result for result in results if result["status"] in BAD]


def line(result: dict) -> str:
    """One result for people."""
    where = " ".join(result[field] for field in ("database", "name", "dtype", "check"))
    return f"{result['status'].upper()} {where}: {result.get('message', '')}"


def totals(summary: dict) -> collections.Counter:
    """Sum over all databases and checks."""
    total: collections.Counter = collections.Counter()
    for checks in summary["checks"].values():
        for counter in checks.values():
            total.update(counter)
    return total


def one_line(summary: dict) -> str:
    """The counts in one sentence."""
    total = totals(summary)
    judged = sum(total[status] for status in ("passed", *BAD))
    share = f"{100 * total['passed'] / judged:.3f} %" if judged else "none"
    counts = ", ".join(f"{total[status]} {status.replace('_', ' ')}" for status in STATUSES)
    return (
        f"{counts}; {share} of the variants with a reference pass; tensors: {total['bit_equal']} bit-equal, "
        f"{total['only_close']} only close; operator calls: {total['own']} own kernels, {total['fallback']} fallback"
    )


def markdown(meta: dict, results: list[dict]) -> str:
    """The report as Markdown: how it was run, one table for each database, and every failure."""
    summary = tally(results)
    lines = [
        f"## {meta['substrate']} substrate, torch {meta['torch']}, {meta['date']}",
        "",
        f"Command: `{meta['command']}` ({meta['seconds']:.0f} s, {meta['jobs']} pairs of processes, "
        f"Python {meta['python']}, {meta['machine']}).",
        "",
        one_line(summary) + ".",
        "",
    ]
    header = ["check", *(status.replace("_", " ") for status in STATUSES), "bit-equal", "only close", "own", "fallback"]
    for database, checks in summary["checks"].items():
        found = summary["entries"].get(database, {"all pass": 0, "of": 0})
        lines += [
            f"### {database}: all checks of all dtypes pass for {found['all pass']} of {found['of']} entries",
            "",
            "| " + " | ".join(header) + " |",
            "|---" + "|---:" * (len(header) - 1) + "|",
        ]
        columns = (*STATUSES, "bit_equal", "only_close", "own", "fallback")
        for check, counter in checks.items():
            lines.append(f"| {check} | " + " | ".join(f"{counter.get(c, 0):,}" for c in columns) + " |")
        lines.append("")
    failures = bad(results)
    if failures:
        lines += ["### Failures", "", "| entry | dtype | check | status | message |", "|---|---|---|---|---|"]
        for result in failures:
            message = result.get("message", "").replace("|", "\\|").replace("\n", " ")[:200]
            lines.append(
                f"| {result['name']} | {result['dtype']} | {result['check']} | {result['status']} | {message} |"
            )
        lines.append("")
    return "\n".join(lines)


def write(folder: pathlib.Path, meta: dict, results: list[dict]) -> None:
    """Write ``conformance.json`` (everything) and ``conformance.md`` (the tables) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = tally(results)
    document = {"meta": meta, "summary": summary, "results": results}
    (folder / "conformance.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    (folder / "conformance.md").write_text(markdown(meta, results))


def merge(folders: list[pathlib.Path]) -> tuple[dict, list[dict]]:
    """Join the results of several slices; they must come from one torch version and substrate.

    Where two of them have the same variant, the later one counts, so that failures can be run again alone.
    """
    documents = [json.loads((folder / "conformance.json").read_text()) for folder in folders]
    meta = dict(documents[0]["meta"])
    for document in documents[1:]:
        for field in ("torch", "substrate"):
            if document["meta"][field] != meta[field]:
                raise ValueError(f"slices differ in {field}: {meta[field]} and {document['meta'][field]}")
        meta["seconds"] += document["meta"]["seconds"]
        meta["command"] += "; " + document["meta"]["command"]
    latest = {
        tuple(result[field] for field in ("database", "name", "dtype", "check")): result
        for document in documents
        for result in document["results"]
    }
    return meta, list(latest.values())


def update_document(document: pathlib.Path, meta: dict, results: list[dict]) -> None:
    """Replace the section of this substrate and torch version in a Markdown document, or add it at the end."""
    key = f"{meta['substrate']} torch {meta['torch']}"
    begin, end = f"<!-- sweep: {key} -->", "<!-- end of sweep -->"
    section = f"{begin}\n{markdown(meta, results)}{end}\n"
    text = document.read_text()
    before, found, rest = text.partition(begin)
    text = f"{before}{section}{rest.partition(end)[2].lstrip()}" if found else f"{text.rstrip()}\n\n{section}"
    document.write_text(text)
