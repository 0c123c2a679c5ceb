"""Metrics of several servers as one text in Prometheus's format."""

from __future__ import annotations

from collections.abc import Mapping


def merged(texts: Mapping[str, str]) -> str:
    """The metrics of all servers, each sample with its server's name as the label `replica`. `texts`: name -> text.

    The format wants all samples of a metric together, below its HELP and TYPE.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}  # metric -> its HELP and TYPE, its samples
    for replica, text in texts.items():
        samples: list[str] = []
        for line in text.splitlines():
            if line.startswith("#"):
                about, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                if line not in about:
                    about.append(line)
            else:
                head, value = line.rsplit(" ", 1)
                name, _, labels = head.removesuffix("}").partition("{")
                samples.append(f'{name}{{replica="{replica}"{labels and ","}{labels}}} {value}')
    return "".join(f"{line}\n" for about, samples in families.values() for line in (*about, *samples))
