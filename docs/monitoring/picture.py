"""Draws panels of the dashboard from what a Prometheus has of the last two minutes: picture.py URL DASHBOARD FILE"""

import json
import math
import sys
import time
import urllib.parse
import urllib.request

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "dashboard", "svg.fonttype": "none", "font.size": 8})
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

SECONDS = 120
# One node, no API server: the other panels would be empty, or flat. The taint controller beside it is a stand-in.
PANELS = [
    "Nodes not ready",
    "Pods the plugin dealt with",
    "Why pods failed or were skipped",
    "How long the plugin takes",
    "Found other than it should be",
    "Passes",
    "Memory",
    "Processor",
    "File descriptors",
]
# What an axis says, and how many of the metric's units one of its own is.
UNITS = {"s": ("milliseconds", 0.001), "bytes": ("MiB", 2**20), "ops": ("per second", 1), "percentunit": ("%", 0.01)}
AXES = {"Nodes not ready": "1: not ready", "Processor": "cores"}


def asked(url, expression, end):
    for name, value in {"$__rate_interval": "10s", "$job": "istio-cni", "$node": ".*"}.items():
        expression = expression.replace(name, value)
    query = urllib.parse.urlencode({"query": expression, "start": end - SECONDS, "end": end, "step": 1})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{query}") as answer:
        return json.load(answer)["data"]["result"]


def legend(form, labels):
    for name, value in labels.items():
        form = form.replace("{{%s}}" % name, value)
    return form


def draw(axes, panel, url, end):
    words, unit = UNITS.get(panel["fieldConfig"]["defaults"]["unit"], ("number", 1))
    for target in panel["targets"]:
        for series in asked(url, target["expr"], end):
            found = {round(at - end) + SECONDS: float(value) / unit for at, value in series["values"]}
            # Where nothing is, no line is drawn.
            points = [(second, found.get(second, math.nan)) for second in range(SECONDS + 1)]
            if not all(math.isnan(value) for _, value in points):
                axes.plot(*zip(*points), label=legend(target["legendFormat"], series["metric"]), linewidth=1.2)
    if not axes.lines:
        sys.exit(f"nothing to draw: {panel['title']}")
    axes.set_title(panel["title"], loc="left", fontweight="bold")
    axes.set_xlabel("seconds")
    axes.set_ylabel(AXES.get(panel["title"], words))
    axes.set_xlim(0, SECONDS)
    axes.set_xticks(range(0, SECONDS + 1, 30))
    # Room for the legend.
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.grid(linewidth=0.3)
    axes.legend(loc="upper left", fontsize=6, framealpha=0.8)


def main(url, dashboard, file):
    with open(dashboard, encoding="utf-8") as text:
        panels = {panel["title"]: panel for panel in json.load(text)["panels"]}
    figure, grid = pyplot.subplots(len(PANELS) // 3, 3, figsize=(13, 8.5), layout="constrained")
    end = time.time()
    for axes, title in zip(grid.flat, PANELS):
        draw(axes, panels[title], url, end)
    figure.savefig(file, metadata={"Date": None})


main(*sys.argv[1:])
