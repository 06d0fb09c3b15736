"""Panels in our words, and their translation to Grafana's JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import common as builders_common
from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as models_common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24
RUN_URL = (
    "/d/scalerl-run?var-namespace=${__data.fields.namespace}&var-run=${__data.fields.run}&${__url_time_range}"
)
"""The dashboard of the run of a row."""


@dataclass(frozen=True)
class Query:
    """A query and what its series are called (``{{label}}``).

    unit: of its column, in ``rows``; ``hidden``: its labels are columns, and its value is none.
    """

    expr: str
    legend: str = ""
    unit: str = "short"


@dataclass(frozen=True)
class Panel:
    """One panel.

    unit: Grafana's name of it (``s``, ``bytes``, ``percentunit``, ``short``).
    kind: ``lines``, ``stacked``, ``number``, ``heat`` (of one histogram's buckets), ``rows`` (a table, a column a query).
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "lines"
    width: int = 8
    height: int = 7
    minimum: float | None = 0.0
    maximum: float | None = None


@dataclass(frozen=True)
class Section:
    """A row of the dashboard with its panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice at the top of the dashboard: the values of ``label`` over the series that ``of`` selects."""

    name: str
    of: str
    many: bool = False


@dataclass(frozen=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    sections: tuple[Section, ...]
    variables: tuple[Variable, ...] = ()
    links: Sequence[tuple[str, str]] = field(default=())
    """Titles and uids of the other dashboards."""

    def json(self) -> str:
        """Grafana's JSON model, with a newline at the end."""
        built = dashboard.Dashboard(self.title).uid(self.uid).description(self.description)
        built = built.tags(["scalerl"]).refresh("30s").time("now-6h", "now").timezone("browser").editable()
        built = built.tooltip(models.DashboardCursorSync.CROSSHAIR)
        built = built.with_variable(
            dashboard.DatasourceVariable("datasource").type("prometheus").label("source")
        )
        for variable in self.variables:
            built = built.with_variable(_choice(variable))
        for title, uid in self.links:
            link = dashboard.DashboardLink(title).type(models.DashboardLinkType.LINK).url(f"/d/{uid}")
            built = built.link(link.keep_time(True).include_vars(True))
        number = 1
        for section in self.sections:
            built = built.with_row(dashboard.Row(section.title).id(number))
            number += 1
            for panel in section.panels:
                built = built.with_panel(_KINDS[panel.kind](panel).id(number))
                number += 1
        return json.dumps(built.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def lines(
    title: str, description: str, *queries: tuple[str, str], unit: str = "short", **more: object
) -> Panel:
    """A graph of ``(query, legend)`` pairs."""
    return Panel(title, description, tuple(Query(*q) for q in queries), unit, **more)  # type: ignore[arg-type]


def number(title: str, description: str, expr: str, *, unit: str = "short", width: int = 4) -> Panel:
    """The newest value of one query, large."""
    return Panel(title, description, (Query(expr),), unit, "number", width, 4, None)


def quantiles(
    title: str, description: str, histogram: str, matchers: str, by: str = "", *, unit: str = "s"
) -> Panel:
    """Median and 95th percentile of a histogram, apart by the label ``by``."""
    grouping = f"le, {by}" if by else "le"
    name = f" {{{{{by}}}}}" if by else ""
    return lines(
        title,
        description,
        *(
            (
                f"histogram_quantile({q}, sum by ({grouping}) (rate({histogram}_bucket{{{matchers}}}[$__rate_interval])))",
                f"p{q * 100:g}{name}",
            )
            for q in (0.5, 0.95)
        ),
        unit=unit,
    )


def _choice(variable: Variable) -> dashboard.QueryVariable:
    choice = dashboard.QueryVariable(variable.name).label(variable.name).datasource(SOURCE)
    choice = choice.query(f"label_values({variable.of}, {variable.name})")
    choice = choice.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    choice = choice.sort(models.VariableSort.ALPHABETICAL_ASC)
    return choice.multi(True).include_all(True).all_value(".*") if variable.many else choice


def _targets(panel: Panel) -> list[prometheus.Dataquery]:
    targets = []
    for place, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + place)).datasource(SOURCE)
        target = target.instant() if panel.kind in ("number", "rows") else target.range()
        if panel.kind == "rows":
            target = target.format(PromQueryFormat.TABLE)
        elif panel.kind == "heat":
            target = target.format(PromQueryFormat.HEATMAP)
        targets.append(target.legend_format(query.legend or "__auto"))
    return targets


def _lines(panel: Panel) -> timeseries.Panel:
    built = timeseries.Panel().title(panel.title).description(panel.description).datasource(SOURCE)
    built = built.span(panel.width).height(panel.height).unit(panel.unit).targets(_targets(panel))
    built = (
        built.line_width(1)
        .fill_opacity(25 if panel.kind == "stacked" else 0)
        .show_points(models_common.VisibilityMode.AUTO)
    )
    built = built.tooltip(builders_common.VizTooltipOptions().mode(models_common.TooltipDisplayMode.MULTI))
    legend = builders_common.VizLegendOptions().display_mode(models_common.LegendDisplayMode.LIST)
    built = built.legend(legend.placement(models_common.LegendPlacement.BOTTOM).show_legend(True).calcs([]))
    if panel.kind == "stacked":
        built = built.stacking(builders_common.StackingConfig().mode(models_common.StackingMode.NORMAL))
    if panel.minimum is not None:
        built = built.min(panel.minimum)
    return built if panel.maximum is None else built.max(panel.maximum)


def _number(panel: Panel) -> stat.Panel:
    built = stat.Panel().title(panel.title).description(panel.description).datasource(SOURCE)
    built = built.span(panel.width).height(panel.height).unit(panel.unit).targets(_targets(panel))
    built = built.reduce_options(
        builders_common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False)
    )
    return built.graph_mode(models_common.BigValueGraphMode.NONE)


def _rows(panel: Panel) -> table.Panel:
    built = table.Panel().title(panel.title).description(panel.description).datasource(SOURCE)
    built = built.span(panel.width).height(panel.height).targets(_targets(panel))
    built = built.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    values = {f"Value #{chr(ord('A') + place)}": query for place, query in enumerate(panel.queries)}
    hidden = {value: True for value, query in values.items() if query.unit == "hidden"}
    names = {value: query.legend for value, query in values.items() if value not in hidden}
    for query in panel.queries:
        if query.unit not in ("short", "hidden"):
            built = built.override_by_name(query.legend, [models.DynamicConfigValue("unit", query.unit)])
    link = {"title": "Open the run", "url": RUN_URL}
    built = built.override_by_name("run", [models.DynamicConfigValue("links", [link])])
    return built.with_transformation(
        models.DataTransformerConfig(
            id_val="organize", options={"excludeByName": {"Time": True} | hidden, "renameByName": names}
        )
    )


def _heat(panel: Panel) -> heatmap.Panel:
    built = heatmap.Panel().title(panel.title).description(panel.description).datasource(SOURCE)
    built = built.span(panel.width).height(panel.height).targets(_targets(panel)).calculate(False)
    return built.y_axis(heatmap.YAxisConfig().unit(panel.unit))


_KINDS = {"lines": _lines, "stacked": _lines, "number": _number, "rows": _rows, "heat": _heat}
