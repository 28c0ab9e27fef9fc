"""Which runs stand together in Figures 7 to 10 of arXiv 2311.03687, latency distributions all of them. Pure."""

from __future__ import annotations

from typing import NamedTuple

from servers.predict.paper import Paper


class Panel(NamedTuple):
    """runs: by what tells them apart in the panel."""

    title: str
    runs: dict[str, str]


class Figure(NamedTuple):
    number: int
    title: str
    panels: list[Panel]


def figures(paper: Paper) -> list[Figure]:
    platforms, models, servers = list(paper.platforms), list(paper.models), list(paper.servers)
    rtx3090 = [name for name in platforms if name.startswith("rtx3090")]

    def same_gpu(platform: str, model: str) -> Panel:
        title = f"{paper.platforms[platform].name}, Llama2-{model.upper()}"
        return Panel(title, {paper.servers[server].name: f"{platform}/{model}/{server}" for server in servers})

    def same_server(server: str, model: str) -> Panel:
        title = f"{paper.servers[server].name}, Llama2-{model.upper()}"
        return Panel(title, {paper.platforms[each].name: f"{each}/{model}/{server}" for each in platforms})

    seventh = [(platform, "7b") for platform in (*rtx3090, "a800")]
    ninth = [(platform, model) for platform in platforms for model in models if (platform, model) not in seventh]
    return [
        Figure(7, "latency on the same GPU platform", [same_gpu(*each) for each in seventh]),
        Figure(8, "latency on different GPU platforms, Llama2-13B", [same_server(each, "13b") for each in servers]),
        Figure(9, "latency on the same GPU platform", [same_gpu(*each) for each in ninth]),
        Figure(10, "latency with the same server", [same_server(s, m) for m in ("7b", "70b") for s in servers]),
    ]
