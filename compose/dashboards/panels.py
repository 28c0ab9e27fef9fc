"""The kinds of panels that the dashboards are made of: one look, one data source, ids and reference letters in order.

A panel is a builder of grafana-foundation-sdk that `dashboard` gives its id. Sizes are in Grafana's grid of 24 columns.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import bargauge, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import common as parts
from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import heatmap as heatmaps
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")
TAG = "llm-dissect"
LINE_HEIGHT, STAT_HEIGHT = 8, 4

# Units as Grafana calls them.
SECONDS, BYTES, RATIO, PER_SECOND, WATTS, JOULES, COUNT = "s", "bytes", "percentunit", "cps", "watt", "joule", "short"
NO_DATA = "no data"  # without it a bar of nothing reads as a tiny value of its unit

Panel = timeseries.Panel | heatmap.Panel | stat.Panel | bargauge.Panel | table.Panel


@dataclass(frozen=True)
class Query:
    """A PromQL expression; `legend` names its series, in a table `column` and `unit` its value."""

    expr: str
    legend: str = ""
    unit: str | None = None
    right: bool = False  # its own axis


def lines(
    title: str,
    unit: str,
    *queries: Query,
    about: str = "",
    width: int = 8,
    stacked: bool = False,
    exemplars: bool = False,
) -> timeseries.Panel:
    """Values over time."""
    panel = (
        timeseries.Panel().title(title).description(about).unit(unit).min(0).datasource(SOURCE)
        .no_value(NO_DATA).height(LINE_HEIGHT).span(width).line_width(1).fill_opacity(60 if stacked else 8)
        .show_points(common.VisibilityMode.AUTO)
        .legend(parts.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST)
                .placement(common.LegendPlacement.BOTTOM).show_legend(True).calcs(["lastNotNull"]))
        .tooltip(parts.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )  # fmt: skip
    if stacked:
        panel.stacking(parts.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    for letter, query in zip(string.ascii_uppercase, queries, strict=False):
        panel.with_target(_target(letter, query).range().exemplar(exemplars))
        if query.right:
            panel.override_by_query(letter, [
                DynamicConfigValue(id_val="unit", value=query.unit or unit),
                DynamicConfigValue(id_val="custom.axisPlacement", value="right"),
                DynamicConfigValue(id_val="custom.fillOpacity", value=0),
                DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [6, 4]}),
            ])  # fmt: skip
    return panel


def heat(title: str, expr: str, about: str = "", width: int = 8) -> heatmap.Panel:
    """A histogram over time. `expr`: counts by `le`, in seconds."""
    target = _target("A", Query(expr, "{{le}}")).range().format(PromQueryFormat.HEATMAP)
    return (
        heatmap.Panel().title(title).description(about).datasource(SOURCE).no_value(NO_DATA)
        .height(LINE_HEIGHT).span(width)
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(heatmaps.HeatmapColorMode.SCHEME).scheme("Turbo").steps(64)
               .fill("dark-blue").scale(heatmaps.HeatmapColorScale.EXPONENTIAL).exponent(0.5).reverse(False))
        .y_axis(heatmap.YAxisConfig().unit(SECONDS).axis_placement(common.AxisPlacement.LEFT))
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .show_color_scale(True).hide_y_histogram()
        .with_target(target)
    )  # fmt: skip


def number(
    title: str, unit: str, query: Query, about: str = "", width: int = 4, name: bool = False, none: str = NO_DATA
) -> stat.Panel:
    """The present value, large; `name`: the legend in its place. `none` stands where there is nothing."""
    mode = common.BigValueTextMode.NAME if name else common.BigValueTextMode.AUTO
    return (
        stat.Panel().title(title).description(about).unit(unit).datasource(SOURCE).no_value(none)
        .height(STAT_HEIGHT).span(width).text_mode(mode)
        .color_mode(common.BigValueColorMode.NONE).graph_mode(common.BigValueGraphMode.NONE)
        .reduce_options(parts.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target("A", query).instant())
    )  # fmt: skip


def bars(title: str, unit: str, *queries: Query, about: str = "", width: int = 8) -> bargauge.Panel:
    """Present values beside each other, each as a bar from zero."""
    panel = (
        bargauge.Panel().title(title).description(about).unit(unit).min(0).datasource(SOURCE)
        .no_value(NO_DATA).height(LINE_HEIGHT).span(width).orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC).value_mode(common.BarGaugeValueMode.TEXT)
        .reduce_options(parts.ReduceDataOptions().calcs(["lastNotNull"]))
    )  # fmt: skip
    for letter, query in zip(string.ascii_uppercase, queries, strict=False):
        panel.with_target(_target(letter, query).instant())
    return panel


def rows(title: str, *queries: Query, about: str = "", width: int = 24, height: int = LINE_HEIGHT) -> table.Panel:
    """A table with a line for each set of labels that the queries share, and a column for each query."""
    hidden = {"Time": True}
    names: dict[str, str] = {}
    panel = table.Panel().title(title).description(about).datasource(SOURCE).no_value(NO_DATA)
    panel.height(height).span(width)
    for letter, query in zip(string.ascii_uppercase, queries, strict=False):
        # The value of a query without a unit says nothing: its labels are what is wanted.
        if query.unit is None:
            hidden[f"Value #{letter}"] = True
        else:
            names[f"Value #{letter}"] = query.legend
            panel.override_by_name(query.legend, [DynamicConfigValue(id_val="unit", value=query.unit)])
        panel.with_target(_target(letter, Query(query.expr)).instant().format(PromQueryFormat.TABLE))
    merge = DataTransformerConfig(id_val="merge", options={})
    columns: dict[str, Any] = {"excludeByName": hidden, "renameByName": names}
    return panel.transformations([merge, DataTransformerConfig(id_val="organize", options=columns)])


def dashboard(
    uid: str, title: str, about: str, rows: Mapping[str, Sequence[Panel]], *, program: str, every: bool, span: str
) -> Dashboard:
    """`rows`: panels by the heading that they stand under. `program`: the runs of which one can be chosen. `every`:
    begins with all of them, else with the newest. `span`: how far back it looks at first."""
    runs = f'llm_dissect_run_info{{program="{program}"}}'
    chosen = (
        boards.QueryVariable("run_id").label("Run").query(f"label_values({runs}, run_id)").datasource(SOURCE)
        .multi(True).include_all(True)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_DESC)
    )  # fmt: skip
    if every:
        chosen.current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    links = boards.DashboardLink("llm-dissect").type(DashboardLinkType.DASHBOARDS).tags([TAG]).keep_time(True)
    board = (
        boards.Dashboard(title).uid(uid).description(about).tags([TAG]).readonly().timezone("browser").refresh("5s")
        .time(f"now-{span}", "now").tooltip(DashboardCursorSync.CROSSHAIR).with_variable(chosen).link(links)
    )  # fmt: skip
    number = 0
    for heading, panels in rows.items():
        number += 1
        board.with_row(boards.Row(heading).id(number))
        for panel in panels:
            number += 1
            board.with_panel(panel.id(number))
    return board.build()


def _target(letter: str, query: Query) -> Dataquery:
    return Dataquery().ref_id(letter).expr(query.expr).legend_format(query.legend).datasource(SOURCE)
