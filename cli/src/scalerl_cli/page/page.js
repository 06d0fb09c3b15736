"use strict";

// Texts of models and data are set as text nodes only; there is no way from a string to markup in this file.
const SVG = "http://www.w3.org/2000/svg";
const POLL_MILLISECONDS = 3000, PAGE_ROWS = 25;
// Title, what the vertical axis counts, metrics; optionally the scale.
const CHARTS = [
  ["Reward in training", "reward", ["reward"]],
  ["Tokens of a completion", "tokens", ["mean_completion_tokens", "completion_tokens_p90", "right_completion_tokens", "wrong_completion_tokens"]],
  ["Entropy", "nats", ["entropy"]],
  ["Mismatch of trainer and generators, KL", "nats", ["sampled_kl", "probe_kl"], "log"],
  ["Staleness", "steps", ["staleness_mean", "staleness_max"]],
  ["Shares of the completions", "share", ["truncated_fraction", "looped_fraction", "unanswered_fraction"]],
  ["Shares of the prompts that score only 0, only 1", "share", ["unsolved_groups_fraction", "solved_groups_fraction"]],
  ["Solved with the n-th reply", "share", ["solved_at_turn_1", "solved_at_turn_2", "solved_at_turn_3", "solved_at_turn_4"]],
  ["Replies of an episode", "replies", ["episode_turns"]],
  ["Shares of the environment, and of malformed calls", "share", ["environment_tokens_fraction", "environment_seconds_fraction", "malformed_calls_fraction"]],
  ["Gradient norm", "norm", ["grad_norm"]],
  ["Gradient norm by kind of weights", "norm", ["grad_norm_embedding", "grad_norm_attention", "grad_norm_mlp", "grad_norm_norm", "grad_norm_head", "grad_norm_other"], "log"],
  ["Distinct completions of a prompt", "share", ["distinct_fraction"]],
  ["KL from the start of the run", "nats", ["start_kl", "start_kl_k1"]],
  ["KL to the reference", "nats", ["reference_kl"]],
  ["Tokens per second", "tokens/s", ["generated_tokens_per_second", "consumed_tokens_per_second"]],
  ["Share of the time without work", "share", ["trainer_bubble_fraction", "generator_bubble_fraction"]],
  ["Model FLOP utilisation", "share", ["mfu"]],
  ["Time of a step, by phase", "seconds", ["wait_seconds", "forward_backward_seconds", "optimizer_seconds", "publish_seconds", "checkpoint_seconds"]],
  ["Busy share of the run so far", "share", ["trainer_busy_fraction", "generator_busy_fraction"]],
];
const PHASES = { "forward, backward": 2, optimizer: 8, fetch: 4, publish: 3, checkpoint: 0, export: 9, "warm start": 5, "lost step": 10, wait: 1, start: 11, other: 6 };
const OTHER = "between two phases: reports to the coordinator, and waits of the first rank for other ranks";
const STEPS = "Step n, of which the first is 0, trains version n of the weights to version n + 1";

const main = document.getElementById("main");
let runs = [], view = null, generation = 0;

// --- small tools -----------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size >= 1e12 || size < 1e-3) return value.toExponential(1);
  for (const [limit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) if (size >= limit) return trimmed(value / limit, digits) + letter;
  return trimmed(value, digits);
}
const trimmed = (value, digits) => String(Number(value.toPrecision(digits)));
const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;

async function get(path, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== undefined && value !== ""));
  const response = await fetch(`${path}?${query}`);
  if (!response.headers.get("Content-Type").startsWith("application/json")) throw new Error(await response.text());
  return response.json();
}

// A text of a list, of which the middle may be left out.
const text = (row, name) => (row[name] ?? "") + (row[`${name}_cut`] ? ` … ${row[`${name}_cut`].toLocaleString("en")} characters … ${row[`${name}_tail`]}` : "");
const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.…]$/.test(text) ? "" : ".");
const problem = (text) => make("p", { class: "quiet" }, sentence(text));

// --- charts ----------------------------------------------------------------------------------------------

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

function logTicks(low, high) {
  const found = [], every = Math.max(1, Math.ceil((high - low) / 5));
  for (let at = Math.ceil(low); at <= high; at += every) found.push(at);
  return found.length ? found : [low];
}

// A chart of lines {label, tone, dash, x, y, kind}, kind: line, raw, dots; bands {tone, x, low, high}; whiskers {tone, x, low, high}.
// Its axes are titled: ``unit`` below, ``rise`` above the vertical one.
function chart(title, { lines, bands = [], whiskers = [], marks = [], log = false, from0 = false, unit = "step", below = unit, rise, height = 205 }) {
  const legend = make("div", { class: "legend" });
  const svg = make("svg:svg", { role: "img", tabindex: "0", "aria-label": `${title}: ${lines.map((one) => one.label).join(", ")}; arrow keys read the values` });
  const figure = make("figure", {}, make("figcaption", {}, title), svg, legend);
  const shown = lines.filter((one) => one.x.length);
  const value = log ? (y) => Math.log10(y) : (y) => y;
  const usable = (y) => y !== null && Number.isFinite(y) && (!log || y > 0);
  let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
  const extend = (x, y) => { if (usable(y)) { low = Math.min(low, value(y)); high = Math.max(high, value(y)); first = Math.min(first, x); last = Math.max(last, x); } };
  for (const one of shown) one.x.forEach((x, at) => extend(x, one.y[at]));
  for (const one of [...bands, ...whiskers]) one.x.forEach((x, at) => { extend(x, one.low[at]); extend(x, one.high[at]); });
  if (from0) low = Math.min(low, 0);
  if (!Number.isFinite(low)) { svg.replaceWith(problem("no values yet")); return figure; }
  if (high === low) { const pad = Math.abs(high) / 10 || 1; low -= pad; high += pad; }
  if (last === first) { first -= 1; last += 1; }
  high += 0.04 * (high - low);

  const list = (at) => legend.replaceChildren(...shown.filter((one) => one.kind !== "raw").map((one) => {
    let text = one.label;
    if (at !== undefined) { const near = nearest(one.x, at); text += ` ${number(one.y[near], 4)}`; }
    return make("span", { class: `t${one.tone} dash${one.dash || 0} ${one.kind || ""}` }, text);
  }), at === undefined ? "" : make("em", {}, `${unit} ${number(at, 4)}`));
  list();

  function draw() {
    const width = svg.clientWidth || 340, left = 52, bottom = 34, top = 20, right = 10;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const px = (x) => left + (width - left - right) * (x - first) / (last - first);
    const py = (y) => top + (height - top - bottom) * (1 - (y - low) / (high - low));
    const path = (xs, ys) => {
      let text = "", pen = "M";
      xs.forEach((x, at) => { if (!usable(ys[at])) { pen = "M"; return; } text += `${pen}${px(x).toFixed(1)} ${py(value(ys[at])).toFixed(1)}`; pen = "L"; });
      return text;
    };
    const parts = [make("svg:text", { class: "title", x: left, y: 10 }, log ? `${rise}, logarithmic` : rise), make("svg:text", { class: "title", x: width - right, y: height - 4, "text-anchor": "end" }, below)];
    for (const y of log ? logTicks(low, high) : ticks(low, high, 4)) {
      if (y < low - 1e-12 || y > high + 1e-12) continue;
      parts.push(make("svg:line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) }));
      parts.push(make("svg:text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, number(log ? 10 ** y : y)));
    }
    for (const x of ticks(first, last, Math.max(2, Math.floor(width / 110)))) {
      if (unit !== "compute" && !Number.isInteger(x)) continue;
      parts.push(make("svg:text", { x: px(x), y: height - bottom + 15, "text-anchor": "middle" }, number(x)));
    }
    for (const one of bands) {
      const upper = path(one.x, one.high), lower = path([...one.x].reverse(), [...one.low].reverse());
      parts.push(make("svg:path", { class: `area t${one.tone}`, d: `${upper}L${lower.slice(1)}Z` }));
    }
    for (const one of marks) {
      parts.push(make("svg:line", { class: "mark", x1: px(one.x), x2: px(one.x), y1: top, y2: height - bottom }));
      parts.push(make("svg:text", { x: px(one.x) + 4, y: top + 10 }, one.label));
    }
    for (const one of whiskers) one.x.forEach((x, at) => {
      parts.push(make("svg:line", { class: `whisker t${one.tone}`, x1: px(x), x2: px(x), y1: py(value(one.low[at])), y2: py(value(one.high[at])) }));
      parts.push(make("svg:circle", { class: `dot t${one.tone}`, cx: px(x), cy: py(value(one.middle[at])), r: 3.5 }));
    });
    for (const one of shown) {
      if (one.kind === "dots" || one.x.length === 1) one.x.forEach((x, at) => {
        if (usable(one.y[at])) parts.push(make("svg:circle", { class: `dot t${one.tone}`, cx: px(x), cy: py(value(one.y[at])), r: one.x.length > 150 ? 1.6 : 2.8 }));
      });
      else parts.push(make("svg:path", { class: `line t${one.tone} dash${one.dash || 0} ${one.kind || ""}`, d: path(one.x, one.y) }));
    }
    const cursor = make("svg:line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
    svg.replaceChildren(...parts, cursor);
    const point = (x) => { cursor.setAttribute("x1", px(x)); cursor.setAttribute("x2", px(x)); cursor.setAttribute("visibility", "visible"); list(x); svg.reading = x; };
    const xs = shown[0] ? shown[0].x : [];
    svg.onpointermove = (event) => {
      const x = first + (event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right) * (last - first);
      if (xs.length) point(xs[nearest(xs, x)]);
    };
    svg.onpointerleave = svg.onblur = () => { cursor.setAttribute("visibility", "hidden"); list(); };
    svg.onkeydown = (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (!move || !xs.length) return;
      event.preventDefault();
      const at = svg.reading === undefined ? xs.length - 1 : nearest(xs, svg.reading) + move;
      point(xs[Math.max(0, Math.min(xs.length - 1, at))]);
    };
  }
  let drawn = 0;
  new ResizeObserver(() => { if (svg.clientWidth !== drawn) { drawn = svg.clientWidth; draw(); } }).observe(svg);
  return figure;
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle + 1; else high = middle; }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

// A moving mean over 5 % of the points, from five on.
function smooth(ys) {
  const half = Math.floor(ys.length / 40);
  if (half < 2) return null;
  const sums = [0];
  for (const y of ys) sums.push(sums[sums.length - 1] + y);
  return ys.map((_, at) => { const a = Math.max(0, at - half), b = Math.min(ys.length, at + half + 1); return (sums[b] - sums[a]) / (b - a); });
}

// --- the views -------------------------------------------------------------------------------------------

const VIEWS = {
  curve: {
    parts: ["curve"],
    async fill(place) {
      const curves = await Promise.all(runs.map((_, run) => get("/api/curve", { run })));
      const lines = [], bands = [], whiskers = [], marks = [], words = [];
      curves.forEach((curve, run) => {
        const tone = runs.length > 1 ? run % 6 : 0, of = runs.length > 1 ? `${runs[run].name}: ` : "";
        if (curve.points.length) lines.push({ label: `${of}evaluation`, tone, kind: "dots", x: curve.points.map((p) => p[0]), y: curve.points.map((p) => p[1]) });
        if (curve.bands) {
          lines.push({ label: `${of}fitted curve and forecast`, tone, x: curve.grid, y: curve.bands[2] });
          bands.push({ tone, x: curve.grid, low: curve.bands[0], high: curve.bands[4] }, { tone, x: curve.grid, low: curve.bands[1], high: curve.bands[3] });
          marks.push({ x: curve.now, label: of ? "" : "now" });
        }
        if (curve.forecast) {
          const ahead = curve.forecast;
          whiskers.push({ tone, x: [ahead.compute], low: [ahead.low], high: [ahead.high], middle: [ahead.median] });
          words.push(make("p", {}, `${of || "A"}${of ? "a" : ""}t twice the compute the reward is forecast to be ${ahead.median.toFixed(3)}, with 90 % probability between ${ahead.low.toFixed(3)} and ${ahead.high.toFixed(3)}` +
            (curve.state === "OK" ? `; the asymptote is ${curve.asymptote.median.toFixed(3)} (${curve.asymptote.low.toFixed(3)} to ${curve.asymptote.high.toFixed(3)}).` : "; the asymptote cannot be identified yet.")));
        }
        if (curve.problem) words.push(problem(`${of}no forecast: ${curve.problem}`));
        if (curve.why) words.push(make("details", { open: runs.length === 1 }, make("summary", {}, curve.state === "BROKEN" ? `${of}why is there no forecast?` : `${of}why is the forecast as wide as it is?`),
          make("ul", {}, curve.why.map((text) => make("li", {}, sentence(text))))), make("details", {}, make("summary", {}, `${of}all figures of the fit`), make("pre", {}, curve.text)));
      });
      const others = curves.flatMap((curve, run) => Object.entries(curve.others || {}).map(([name, points], at) => ({ label: runs.length > 1 ? `${runs[run].name}: ${name}` : name,
        tone: runs.length > 1 ? run % 6 : (at + 1) % 6, dash: runs.length > 1 ? at % 4 : 0, x: points.map((p) => p[0]), y: points.map((p) => p[1]) })));
      const named = curves.find((curve) => curve.unit), below = named && named.unit !== "compute" ? `compute, ${named.unit}` : "compute";
      place.replaceChildren(...(lines.length ? [chart("Reward of the evaluations", { lines, bands, whiskers, marks, unit: "compute", below, rise: "reward", height: 345 })] : []), ...words,
        others.length ? chart("Reward of the other evaluation sets", { lines: others, unit: "compute", below, rise: "reward", height: 235 }) : "",
        make("p", { class: "row" }, make("a", { href: link("rollouts", WORST) }, "the worst completions of the last evaluation")));
    },
  },

  metrics: {
    parts: ["series"],
    async fill(place, options) {
      const wanted = CHARTS.flatMap((one) => one[2]).concat(options.metric || []);
      const [known, ...found] = await Promise.all([get("/api/metrics", { run: 0 }), ...runs.map((_, run) => get("/api/metrics", { run, names: wanted.join(",") }))]);
      const all = options.metric ? [[options.metric, "value", [options.metric]], ...CHARTS] : CHARTS;
      const charts = all.map(([title, rise, names, scale]) => {
        const lines = [];
        found.forEach((one, run) => names.forEach((name, place) => {
          const points = one.series[name];
          if (!points || !points[0].length) return;
          const tone = runs.length > 1 ? run % 6 : place, dash = runs.length > 1 ? place % 4 : 0;
          const label = (runs.length > 1 ? `${runs[run].name} ` : "") + (names.length > 1 || runs.length === 1 ? name : "");
          const even = names.length === 1 && scale !== "log" ? smooth(points[1]) : null;
          if (even) lines.push({ label, tone, x: points[0], y: points[1], kind: "raw" });
          lines.push({ label: even ? `${label} (moving mean)` : label, tone, dash, x: points[0], y: even || points[1] });
        }));
        return lines.length ? chart(title, { lines, rise, log: scale === "log", from0: scale !== "log" && !names.includes("grad_norm") }) : null;
      }).filter(Boolean);
      const choice = make("select", { "aria-label": "another metric", onchange: (event) => go("metrics", { metric: event.target.value }) },
        make("option", { value: "" }, "another metric …"), known.names.map((name) => make("option", { selected: name === options.metric }, name)));
      place.replaceChildren(make("div", { class: "row" }, choice), charts.length ? make("div", { class: "charts" }, charts) : problem("no step was trained yet"));
    },
  },

  rollouts: {
    parts: ["rollouts"],
    quiet: true,
    async fill(place, options) {
      const run = Number(options.run || 0), offset = Number(options.offset || 0);
      const state = make("p", { class: "quiet", role: "status" }, "Searching …"), list = make("div");
      place.replaceChildren(rolloutForm(options), state, list);
      const mine = generation;
      const found = await get("/api/rollouts", { ...options, run, offset, limit: PAGE_ROWS });
      if (mine !== generation) return;
      if (found.problem) { state.replaceWith(problem(found.problem)); return; }
      state.textContent = `${found.matching.toLocaleString("en")} of ${found.total.toLocaleString("en")} recorded rollouts match` +
        (found.rows.length < found.matching ? `; ${(offset + 1).toLocaleString("en")} to ${(offset + found.rows.length).toLocaleString("en")} are shown` : "") + (ORDERS[options.sort] ? `. Sorted by ${ORDERS[options.sort]}, the ${options.descending ? "largest" : "lowest"} first; equal ones by step, prompt and completion` : "");
      list.replaceChildren(...found.notes.map((text) => make("p", { class: "bad" }, text)), ...found.rows.map((row) => rollout(row, run)),
        make("div", { class: "row" },
          make("button", { disabled: offset === 0, onclick: () => go("rollouts", { ...options, offset: Math.max(0, offset - PAGE_ROWS) || "" }) }, "previous"),
          make("button", { disabled: offset + found.rows.length >= found.matching, onclick: () => go("rollouts", { ...options, offset: offset + PAGE_ROWS }) }, "next")));
    },
  },

  prompt: {
    parts: ["rollouts"],
    quiet: true,
    async fill(place, options) {
      const run = Number(options.run || 0);
      const recent = await get("/api/rollouts", { run, split: "held-out", step: "last", limit: 200 });
      const train = recent.rows && recent.rows.length ? null : await get("/api/rollouts", { run, step: "last", limit: 200 });
      const rows = (train || recent).rows;
      if (!rows) { place.replaceChildren(problem((train || recent).problem)); return; }
      const firsts = new Map();
      for (const row of rows) if (row.prompt_id !== null && !firsts.has(`${row.split} ${row.task} ${row.prompt_id}`)) firsts.set(`${row.split} ${row.task} ${row.prompt_id}`, row);
      const first = firsts.values().next().value;
      const chosen = options.prompt ? { split: options.split, task: options.task, prompt_id: options.prompt } : first;
      if (!chosen) { place.replaceChildren(problem("no prompt was recorded yet")); return; }
      const same = { run, prompt: chosen.prompt_id, task: chosen.task, split: String(chosen.split).replace("_", "-") };
      const { steps, problem: failed } = await get("/api/prompt", same);
      if (failed || !steps.length) { place.replaceChildren(problem(failed || `no completion of prompt ${chosen.prompt_id} is recorded`)); return; }
      const left = options.from || String(steps[0].step), right = options.to || String(steps[steps.length - 1].step);
      const here = { run: options.run, prompt: same.prompt, task: same.task, split: same.split, from: left, to: right };
      const word = same.split === "held-out" ? "version" : "step";
      const pick = (name, value) => make("label", {}, `${word}, ${name === "from" ? "left" : "right"}`, make("select", { onchange: (event) => go("prompt", { ...here, [name]: event.target.value }) },
        steps.map((one) => make("option", { value: one.step, selected: String(one.step) === value }, `${one.step}: reward ${number(one.reward)}`))));
      const options_ = [...firsts.values()].map((row) => make("option", { value: JSON.stringify([row.prompt_id, row.task, row.split.replace("_", "-")]), selected: row.prompt_id === same.prompt && row.task === same.task }, `${row.prompt_id}: ${text(row, "prompt").slice(-60)}`));
      const choose = make("select", { "aria-label": "prompt", onchange: (event) => { const [prompt, task, split] = JSON.parse(event.target.value); go("prompt", { run: options.run, prompt, task, split }); } },
        firsts.has(`${same.split.replace("-", "_")} ${same.task} ${same.prompt}`) ? [] : make("option", { selected: true }, same.prompt), options_);
      const sides = await Promise.all([left, right].map((step) => get("/api/rollouts", { ...same, step, limit: 64 })));
      const shown = sides.flatMap((side) => side.rows || [])[0];
      const graded = steps.filter((one) => one.reward !== null);
      place.replaceChildren(runChoice("prompt", options), make("div", { class: "row" }, make("label", {}, "prompt of the last evaluation, or chosen under Rollouts", choose), pick("from", left), pick("to", right)),
        shown ? make("div", { class: "text box", dir: "auto" }, text(shown, "prompt")) : "",
        chart("Mean reward of this prompt's completions", { lines: [{ label: same.prompt, tone: 0, x: graded.map((one) => one.step), y: graded.map((one) => one.reward), kind: graded.length < 40 ? "dots" : "line" }], unit: word, rise: "reward", from0: true, height: 140 }),
        make("p", { class: "quiet" }, `${STEPS}.`),
        make("div", { class: "two" }, sides.map((side, at) => make("div", {}, make("h3", {}, `${word} ${at ? right : left}`), side.rows ? side.rows.map((row) => rollout(row, run, true)) : problem(side.problem)))));
    },
  },

  timeline: {
    parts: ["timeline"],
    async fill(place, options) {
      const run = Number(options.run || 0), count = Number(options.count || 12);
      const found = await get("/api/timeline", { run, last: options.last, count });
      if (found.problem) { place.replaceChildren(runChoice("timeline", options), problem(found.problem)); return; }
      const move = (last) => go("timeline", { ...options, last: last >= found.of ? "" : Math.max(count - 1, last) });
      const total = found.end - found.begin, shares = Object.entries(found.shares).sort((a, b) => b[1] - a[1]).filter((one) => one[1] > 0.0005 * total);
      place.replaceChildren(runChoice("timeline", options),
        make("div", { class: "row" },
          make("button", { disabled: found.first === 0, onclick: () => move(found.first - 1) }, "earlier"), make("button", { disabled: found.last >= found.of, onclick: () => move(found.last + count) }, "later"),
          make("label", {}, "steps", make("select", { onchange: (event) => go("timeline", { ...options, count: event.target.value }) }, [5, 12, 50, 200].map((n) => make("option", { selected: n === count }, n)))),
          make("span", { class: "quiet" }, `steps ${found.first} to ${found.last}, ${number(total)} s; the newest is step ${found.of}`),
          make("a", { href: `/perfetto.json?run=${run}`, download: true }, "whole run for Perfetto")),
        lanes(found),
        make("div", { class: "legend" }, shares.map(([name, seconds]) => make("span", { class: `t${PHASES[name]}` }, `${name} ${percent(seconds / total)}`))),
        found.shares.other > 0.0005 * total ? make("p", { class: "quiet" }, `other: ${OTHER}.`) : "",
        make("p", {}, found.busy === null ? "" : `Over the whole run the trainer computes for ${percent(found.busy)} of the time (forward, backward and optimizer, the warm start, and lost steps, which were trained again).`),
        ...found.generators.map((one) => make("p", { class: "quiet" }, `${one.name || "a generator that is not known"}: ${one.groups.toLocaleString("en")} groups; ${percent(one.idle)} of the time without one of training`)),
        found.traced ? make("p", { class: "quiet" }, "Evaluations, which generators also sample, are not in the trace.") : make("p", { class: "quiet" }, "Generators are shown for runs with a trace (spec.trace: true)."),
        make("h2", {}, "What the trainer waited for"),
        found.waits.length ? make("table", {}, make("thead", {}, make("tr", {}, ["before step", "waited", "for"].map((text) => make("th", {}, text)))),
          make("tbody", {}, found.waits.map((wait) => make("tr", {}, make("td", { class: "number", "data-name": "before step" }, wait.step), make("td", { class: "number", "data-name": "waited" }, `${wait.seconds.toFixed(1)} s`), make("td", {}, wait.why))))) : problem("nothing: it did not wait in these steps"));
    },
  },

  decisions: {
    parts: ["decisions"],
    async fill(place, options) {
      const { decisions, of } = await get("/api/decisions", { run: Number(options.run || 0) });
      place.replaceChildren(runChoice("decisions", options), decisions.length ? make("p", { class: "quiet" }, `${of.toLocaleString("en")} decisions; the newest ${decisions.length} are shown`) : problem("no decisions: a run makes them with autoscaling.mode Advisory or Auto"),
        decisions.length ? make("table", {}, make("thead", {}, make("tr", {}, ["time", "state", "reasons, the decisive one first", "action"].map((text) => make("th", {}, text)))), make("tbody", {}, decisions.map((one) =>
          make("tr", {}, make("td", {}, one.time.replace("T", " ").slice(0, 19)), make("td", {}, one.state), make("td", {}, make("ul", {}, [...one.reasons, ...one.advice.map((text) => `advice: ${text}`)].map((text) => make("li", {}, text)))),
            make("td", {}, Object.entries(one.action).filter(([, value]) => value !== "none").map(([name, value]) => `${name}: ${typeof value === "object" ? JSON.stringify(value) : value}`).join("; ") || "none"))))) : "");
    },
  },
};
const WORST = { split: "held-out", step: "last", sort: "reward" };
const ORDERS = { reward: "reward", advantage: "advantage", tokens: "length", age: "age", difference: "log-probability difference" };

function runChoice(name, options) {
  if (runs.length < 2) return "";
  return make("div", { class: "row" }, make("label", {}, "run", make("select", { onchange: (event) => go(name, { run: event.target.value }) }, runs.map((run, at) => make("option", { value: at, selected: at === Number(options.run || 0) }, run.name)))));
}

function rolloutForm(options) {
  const field = (name, text, hint) => make("label", {}, text, make("input", { name, value: options[name] || "", placeholder: hint, autocomplete: "off" }));
  const choice = (name, text, known) => make("label", {}, text, make("select", { name }, known.map(([value, shown]) => make("option", { value, selected: (options[name] || "") === value }, shown))));
  const check = (name, text) => make("label", { class: "check" }, make("input", { type: "checkbox", name, value: "1", checked: options[name] === "1" }), text);
  const form = make("form", { onsubmit: (event) => {
    event.preventDefault();
    go("rollouts", { run: options.run, ...Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== "")) });
  } },
    choice("split", "of", [["", "all"], ["train", "training"], ["held-out", "evaluations"]]),
    field("step", "step or version", "5, 0:20 or last"), field("reward", "reward", "0 or 0.5:1"), field("contains", "text in the completion", "case matters"),
    field("label", "label", "name=value"), field("task", "task", ""), field("prompt", "prompt id", ""), field("excluded", "not trained on", "zero-variance"),
    choice("sort", "sorted by", [["", "step"], ...Object.entries(ORDERS)]),
    check("descending", "largest first"), check("truncated", "only cut off"), make("button", {}, "Search"));
  const ready = [["worst of the last evaluation", WORST], ["newest of training", { split: "train", sort: "step", descending: "1" }], ["cut off", { truncated: "1", descending: "1" }], ["largest differences", { sort: "difference", descending: "1" }]];
  return make("div", {}, runChoice("rollouts", options), make("p", { class: "row" }, ready.map(([text, query]) => make("a", { href: link("rollouts", { run: options.run, ...query }) }, text))), form, make("p", { class: "quiet" }, `${STEPS}; an evaluation samples one version.`));
}

// One completion. Its details are read when they are asked for.
function rollout(row, run, brief = false) {
  const held = row.split === "held_out", facts = [];
  const chip = (text, tone, heat) => { const one = make("span", { class: `chip t${tone}` }, text); one.style.setProperty("--heat", heat); return one; };
  if (!brief) facts.push(make("strong", {}, `${held ? "evaluation of version" : "step"} ${row.step}`), `${row.task}, prompt ${row.prompt_id ?? row.prompt_index}`);
  facts.push(`completion ${row.sample}`);
  if (row.reward !== null) facts.push(chip(`reward ${number(row.reward)}`, row.reward >= 0.5 ? 2 : 1, 0.12 + 0.3 * Math.abs(row.reward - 0.5)));
  facts.push(`${row.tokens.toLocaleString("en")} tokens`);
  if (row.finish_reason === "length") facts.push(chip("cut off", 1, 0.3));
  if (row.advantage !== null && !brief) facts.push(`advantage ${row.advantage >= 0 ? "+" : ""}${number(row.advantage)}`);
  if (row.logprob_difference_max !== null) facts.push(chip(`difference ${number(row.logprob_difference_mean, 2)}, at most ${number(row.logprob_difference_max, 2)}`, 3, Math.min(0.6, row.logprob_difference_max / 2)));
  if (row.oldest_version !== null && !held) facts.push(row.oldest_version === row.newest_version ? `version ${row.oldest_version}` : chip(`versions ${row.oldest_version} to ${row.newest_version}`, 4, 0.25));
  if (row.excluded) facts.push(chip(`not trained on: ${row.excluded}`, 4, 0.25));
  const whole = make("div"), body = make("div", { class: "text short", dir: "auto" }, row.completion === null ? "(no completion)" : text(row, "completion"));
  const open = make("button", { "aria-expanded": "false", onclick: async () => {
    const shut = whole.firstChild !== null;
    open.setAttribute("aria-expanded", String(!shut));
    open.textContent = shut ? "open" : "close";
    body.hidden = !shut;
    whole.replaceChildren(...(shut ? [] : await details(row, run)));
  } }, "open");
  return make("article", {}, make("div", { class: "head" }, facts.map((one) => (typeof one === "string" ? make("span", {}, one) : one)), open,
    brief || row.prompt_id === null ? "" : make("a", { href: link("prompt", { run: run || "", prompt: row.prompt_id, task: row.task, split: row.split.replace("_", "-") }) }, "this prompt over time")),
    brief || row.prompt === null ? "" : make("div", { class: "text prompt short", dir: "auto" }, text(row, "prompt")), body, whole);
}

async function details(row, run) {
  const found = await get("/api/rollouts", { run, full: "1", split: row.split.replace("_", "-"), step: row.step, task: row.task, prompt: row.prompt_id ?? "", sample: row.sample });
  const one = found.rows && found.rows.find((other) => other.slot === row.slot && other.prompt_index === row.prompt_index);
  if (!one) return [problem(found.problem || "this rollout is no longer in the record")];
  const texts = [["prompt", one.prompt], ["completion", one.completion], ["reference", one.reference], ["error of the verifier", one.error]].filter((pair) => pair[1]);
  const other = { ...Object.fromEntries(Object.entries(one.parts || {}).map(([name, value]) => [`part ${name}`, number(value)])), ...Object.fromEntries(Object.entries(one.labels || {}).map(([name, value]) => [`label ${name}`, value])) };
  for (const name of ["training_reward", "advantage", "oldest_version", "newest_version", "age", "logprob_difference_mean", "logprob_difference_max", "slot"]) if (one[name] !== null) other[name.replaceAll("_", " ")] = number(one[name], 4);
  const shownAs = (name, text) => (name === "completion" && one.by_token.length ? byToken(one.by_token) : [make("div", { class: "text box", dir: "auto", tabindex: "0" }, text)]);
  return [...texts.flatMap(([name, text]) => [make("h3", {}, name), ...shownAs(name, text)]),
    make("p", { class: "quiet" }, Object.entries(other).map(([name, value]) => `${name} ${value}`).join(" · "))];
}

// A completion, coloured by a figure of its tokens. Neighbours of one colour are one element: a completion may have 100,000 tokens.
const COLOURED = 0.02; // nats
function byToken(tokens) {
  const known = tokens.some((one) => one[2] !== null), order = [...new Set(tokens.map((one) => one[1]))].filter((version) => version >= 0).sort((a, b) => a - b);
  const colours = {
    difference: ([, , nats]) => (nats === null || Math.abs(nats) < COLOURED ? "" : `${nats > 0 ? "t0" : "t1"} ${Math.ceil(5 * Math.min(1, Math.sqrt(Math.abs(nats) / 2)))}`),
    version: ([, version]) => (version < 0 ? "t6 5" : `t${order.indexOf(version) % 6} 2`),
    nothing: () => "",
  };
  const box = make("div", { class: "text box", dir: "auto", tabindex: "0" }), legend = make("p", { class: "quiet" });
  const paint = (by) => {
    const runs = [];
    tokens.forEach((token, at) => {
      const colour = colours[by](token), last = runs[runs.length - 1];
      if (last && last.colour === colour) { last.text += token[0]; last.end = at; last.tokens.push(token); } else runs.push({ colour, text: token[0], begin: at, end: at, tokens: [token] });
    });
    box.replaceChildren(...runs.map((one) => {
      if (!one.colour) return document.createTextNode(one.text);
      const [tone, heat] = one.colour.split(" "), where = one.begin === one.end ? `token ${one.begin}` : `tokens ${one.begin} to ${one.end}`;
      const worst = one.tokens.reduce((most, token) => (Math.abs(token[2]) > Math.abs(most[2]) ? token : most))[2], version = one.tokens[0][1];
      const span = make("span", { class: `chip ${tone}`, title: `${where}: ${by === "version" ? (version < 0 ? "not sampled" : `version ${version}`) : `${worst > 0 ? "+" : ""}${number(worst, 2)} nats`}` }, one.text);
      span.style.setProperty("--heat", 0.12 * Number(heat));
      return span;
    }));
    legend.textContent = { difference: `log-probability of the trainer minus that of the generator, from ±${COLOURED} nats on; the first colour: the trainer finds the token likelier`, version: `${order.length === 1 ? `version ${order[0]}` : `versions ${order[0]} to ${order[order.length - 1]}`} sampled it; grey: tokens that no version sampled. The end token has no text`, nothing: "" }[by];
  };
  const first = order.length > 1 || !known ? "version" : "difference";
  paint(first);
  return [make("div", { class: "row" }, make("label", {}, "coloured by", make("select", { onchange: (event) => paint(event.target.value) },
    Object.keys(colours).filter((by) => known || by !== "difference").map((by) => make("option", { value: by, selected: by === first }, by)))), legend), box];
}

function lanes(found) {
  const svg = make("svg:svg", { role: "img", "aria-label": "what trainer and generators did, over time; the table below lists the longest waits" });
  const height = 46 + 46 + 46 * found.generators.length;
  let drawn = 0;
  new ResizeObserver(() => {
    const width = svg.clientWidth;
    if (!width || width === drawn) return;
    drawn = width;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const px = (t) => width * (t - found.begin) / (found.end - found.begin), parts = [];
    const title = (text) => make("svg:title", {}, text);
    const labels = [make("svg:text", { x: 0, y: 11 }, "trainer")];
    parts.push(make("svg:rect", { class: "bar t6", x: 0, y: 16, width, height: 26 }, title(`other: ${OTHER}`)));
    for (const [name, begin, end, step] of found.trainer)
      parts.push(make("svg:rect", { class: `bar t${PHASES[name]}`, x: px(begin).toFixed(2), y: 16, width: Math.max(0.4, px(end) - px(begin)).toFixed(2), height: 26 }, title(`step ${step}: ${name}, ${(end - begin).toFixed(2)} s`)));
    found.generators.forEach((one, at) => {
      const top = 46 + 46 * at, most = Math.max(...one.counts, 1), y = (count) => top + 44 - 28 * count / most;
      let path = `M${px(Math.max(found.begin, one.times[0])).toFixed(1)} ${y(0)}`;
      one.times.forEach((time, place) => { path += `H${px(time).toFixed(1)}V${y(one.counts[place]).toFixed(1)}`; });
      labels.push(make("svg:text", { x: 0, y: top + 11 }, `${one.name || "generator not known"}: groups in work, at most ${most}`));
      parts.push(make("svg:path", { class: "bar t0", opacity: 0.75, d: `${path}V${y(0)}Z` }));
    });
    for (const [time, version] of found.publishes) if (found.publishes.length <= 60) parts.push(make("svg:line", { class: "mark", x1: px(time), x2: px(time), y1: 16, y2: height - 42 }, title(`version ${version} reached the generators`)));
    for (const t of ticks(found.begin, found.end, Math.max(3, Math.floor(width / 100)))) parts.push(make("svg:text", { x: px(t), y: height - 22, "text-anchor": "middle" }, number(t, 5)));
    labels.push(make("svg:text", { class: "title", x: width, y: height - 4, "text-anchor": "end" }, "seconds since the start of the run"));
    svg.replaceChildren(...parts, ...labels);
  }).observe(svg);
  return make("figure", {}, svg);
}

// --- routes and polling ----------------------------------------------------------------------------------

function link(name, options) {
  const query = new URLSearchParams(Object.entries(options).filter(([, value]) => value !== undefined && value !== null && value !== ""));
  return `#${name}${[...query].length ? `?${query}` : ""}`;
}
const go = (name, options) => { location.hash = link(name, options); };

function route() {
  const [name, query] = location.hash.slice(1).split("?");
  const known = Object.hasOwn(VIEWS, name) ? name : "curve";
  return { name: known, options: Object.fromEntries(new URLSearchParams(query || "")) };
}

async function show() {
  const { name, options } = route(), mine = ++generation;
  for (const one of document.querySelectorAll("#nav a")) one.getAttribute("href") === `#${name}` ? one.setAttribute("aria-current", "page") : one.removeAttribute("aria-current");
  const place = make("div");
  const fresh = view === null || view.name !== name;
  view = { name, run: Number(options.run || 0), revision: revision(name, Number(options.run || 0)) };
  if (fresh) main.replaceChildren(problem("reading …"));
  try {
    const filling = VIEWS[name].fill(place, options);
    if (name === "rollouts") main.replaceChildren(place);
    await filling;
    if (mine === generation) main.replaceChildren(place);
  } catch (error) {
    if (mine === generation) main.replaceChildren(problem(String(error.message || error).trim()));
  }
}

const revision = (name, run) => JSON.stringify((name === "curve" || name === "metrics" ? runs : runs.slice(run, run + 1)).map((one) => VIEWS[name].parts.map((part) => one.revisions[part])));

function header() {
  const lines = runs.map((run, at) => {
    if (run.problem) return make("div", { class: "run" }, make("h1", {}, run.name), make("p", { class: "bad" }, `${run.directory}: ${run.problem}`));
    const facts = [run.steps ? `${run.steps.toLocaleString("en")} ${run.steps === 1 ? "step" : "steps"} trained` : "no step trained yet"];
    if (run.reward !== null) facts.push(`reward in training ${run.reward.toFixed(3)}`);
    if (run.tokens !== null) facts.push(`${number(run.tokens)} tokens a completion`);
    facts.push(run.ended ? `ended: ${run.ended}` : run.changed === null ? "" : `last change ${ago(run.changed)}`);
    return make("div", { class: `run t${runs.length > 1 ? at % 6 : 0}` }, make("h1", {}, run.name), make("p", { class: "quiet" }, facts.filter(Boolean).join(" · "), make("span", {}, ` · ${run.directory}`)),
      run.note ? make("p", { class: "bad" }, run.note) : "",
      run.steps ? make("p", { class: run.health ? "bad" : "" }, run.health ? sentence(run.health) : "Nothing is wrong in the last steps, as far as the metrics show.") : "");
  });
  const place = document.getElementById("runs");
  if (place.textContent !== lines.map((line) => line.textContent).join("")) place.replaceChildren(...lines);
}

function ago(seconds) {
  if (seconds < 10) return "seconds ago";
  for (const [size, name] of [[86400, "days"], [3600, "hours"], [60, "minutes"]]) if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${name} ago`;
  return `${10 * Math.floor(seconds / 10)} s ago`;
}

async function poll() {
  try {
    runs = (await get("/api/state")).runs;
    document.getElementById("lost").hidden = true;
    document.title = `${runs.map((run) => run.name).join(", ")} – ScaleRL`;
    header();
    if (view && view.revision !== revision(view.name, view.run)) {
      if (!VIEWS[view.name].quiet) await show();
      else if (!document.getElementById("newer")) main.prepend(make("p", { id: "newer" }, make("button", { onclick: show }, "there are newer rollouts: search again")));
    }
  } catch (error) {
    document.getElementById("lost").hidden = false;
  }
}

async function live() {
  for (;;) {
    await new Promise((done) => setTimeout(done, POLL_MILLISECONDS));
    if (!document.hidden) await poll();
  }
}

window.addEventListener("hashchange", () => { main.focus({ preventScroll: true }); show(); });
poll().then(show).then(live);
