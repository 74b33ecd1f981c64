"use strict";
// The page's program. Every text of a run goes into the page as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const byId = (id) => document.getElementById(id);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const runColor = (place) => color(`run-${place % 6}`);

  /* ---- small helpers ---- */
  // make("p.hint", {title: "…"}, "text", child)
  function make(kind, given = {}, ...children) {
    const [tag, ...classes] = kind.split(".");
    const node = document.createElement(tag);
    if (classes.length) node.className = classes.join(" ");
    for (const [name, value] of Object.entries(given)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  function fill(node, ...children) { node.replaceChildren(...children.flat().filter((each) => each !== null && each !== undefined)); }
  function number(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    if (size < 1e-3) return value.toExponential(1).replace("e", "e");
    return String(Number(value.toPrecision(digits)));
  }
  // As many digits as tell neighbors apart, and one notation for all of an axis.
  function ofAxis(ticks) {
    const most = Math.max(...ticks.map(Math.abs)), step = ticks.length > 1 ? ticks[1] - ticks[0] : most;
    if (!(most > 0)) return ticks.map(String);
    const place = (value) => Math.floor(Math.log10(value) + 1e-9);
    const size = place(most), digits = Math.min(12, Math.max(0, -place(step)));
    if (size >= -3 && size < 6) return ticks.map((tick) => tick.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
    const own = Math.max(0, size - place(step));
    return ticks.map((tick) => tick === 0 ? "0" : `${(tick / 10 ** size).toFixed(own)}e${size}`);
  }
  function signed(value) { return (value > 0 ? "+" : value < 0 ? "−" : "") + number(Math.abs(value), 3); }
  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds > 0 && seconds < 0.1) return `${number(seconds * 1000, 3)} ms`;
    if (seconds < 60) return `${number(seconds, 3)} s`;
    const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
    if (minutes < 60) return `${minutes} min ${whole % 60} s`;
    const hours = Math.floor(minutes / 60);
    return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  }
  const count = (value, word) => `${number(value)} ${word}${value === 1 ? "" : "s"}`;
  const ofNumbers = (values) => values.filter((value) => value !== null && value !== undefined);

  /* ---- what the page shows now ---- */
  const shown = { run: 0, step: null, by: "advantages" };
  const stepsOf = (run) => Object.keys(runs[run].steps).map(Number).sort((a, b) => a - b);

  /* ---- runs ---- */
  const STATES = {
    starting: ["soft", "starting"], running: ["good", "running"], finished: ["good", "done"], failed: ["bad", "failed"],
    silent: ["bad", "no sign of life"], requeue: ["warn", "saved and stopped"],
  };
  // As the console has it: an accuracy in percent where each validation is one, else a score.
  function heldOut(run) {
    const [accuracies, scores] = ["accuracy", "score"].map((name) => (run.curves.sparse[`validation/${name}`] || []).filter((point) => point[1] !== null));
    return accuracies.length >= scores.length
      ? { name: "held-out accuracy", points: accuracies, text: (value) => `${(100 * value).toFixed(1)}%` }
      : { name: "held-out score", points: scores, text: (value) => number(value, 3) };
  }
  function showRuns() {
    const cards = runs.map((run, place) => {
      const facts = run.facts, [kind, state] = STATES[facts.state] || ["soft", facts.state];
      const { name: heldOutName, points, text } = heldOut(run), rows = [];
      const add = (name, value) => { if (value !== null && value !== undefined && value !== "") rows.push(make("div", {}, make("dt", {}, name), make("dd", {}, value))); };
      add("algorithm", run.algorithm);
      add("model", run.model);
      add("steps", facts.step === null ? null : `${number(facts.step)}${facts.steps === null ? "" : ` of ${number(facts.steps)}`}`);
      if (points.length) {
        const [first, last] = [points[0], points[points.length - 1]];
        add(heldOutName, points.length > 1 ? `${text(first[1])} → ${text(last[1])}` : text(last[1]));
      }
      add("ranks", facts.ranks === null ? null : `${facts.ranks}${facts.hosts > 1 ? ` on ${facts.hosts} nodes` : ""}`);
      add("time in steps", facts.steps_s ? duration(facts.steps_s) : null);
      add("recent step", facts.step_s === null ? null : duration(facts.step_s));
      add("tokens per second", facts.tokens_per_s === null ? null : number(Math.round(facts.tokens_per_s)));
      add("starts", facts.starts ? String(facts.starts) : null);
      add("checkpoint", facts.saved_step === null ? null : `step ${facts.saved_step}`);
      if (facts.state === "running") add("time left", facts.left_s === null ? null : duration(facts.left_s));
      const mark = make("span.swatch.box", { style: `color: var(--run-${place % 6})`, "aria-hidden": "true" });
      return make("article.card", { "aria-label": `Run ${run.label}` },
        make("div.title", {}, runs.length > 1 ? mark : null, make("strong", {}, run.label),
          run.name !== run.label ? make("span.of", {}, `recipe ${run.name}`) : null, make(`span.chip.${kind}`, {}, state)),
        make("dl.facts", {}, rows),
        facts.cause ? make("p.cause", {}, `Why it ended: ${facts.cause}`) : null,
        facts.activity ? make("p.cause", {}, `Last seen at ${facts.activity}`) : null);
    });
    fill(byId("runs"), make("div.cards", {}, cards));
  }

  /* ---- curves ---- */
  const lastStep = Math.max(1, ...runs.map((run) => Math.max(0, ...run.curves.steps)));
  const charts = [];
  const sync = uPlot.sync("steps");

  function lineOf(run, metric) {
    const dense = run.curves.metrics[metric];
    if (dense) return run.curves.steps.map((step, place) => [step, dense[place]]);
    return run.curves.sparse[metric] || [];
  }
  // Lines of all runs on one axis of steps, as uPlot wants them.
  function together(lines) {
    const steps = [...new Set(lines.flatMap((line) => line.map((point) => point[0])))].sort((a, b) => a - b);
    const place = new Map(steps.map((step, at) => [step, at]));
    const columns = lines.map((line) => {
      const column = new Array(steps.length).fill(undefined);
      for (const [step, value] of line) column[place.get(step)] = value;
      return column;
    });
    return [steps, ...columns];
  }
  function chartOf(panel) {
    const lines = [], series = [{}], bands = [], legend = [];
    runs.forEach((run, place) => {
      const stroke = () => runColor(place), line = lineOf(run, panel.metric);
      if (panel.band && line.length) {
        const [low, high] = panel.band.map((name) => lineOf(run, name));
        if (low.length && high.length) {
          lines.push(high, low);
          const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
          series.push({ ...hidden, label: "high" }, { ...hidden, label: "low" });
          bands.push({ series: [series.length - 2, series.length - 1], fill: () => runColor(place) + "26" });
        }
      }
      if (line.length) {
        lines.push(line);
        series.push({ label: run.label, stroke, width: 1.8, spanGaps: true, run: place, line,
          points: { show: line.length <= 60, size: 4, fill: stroke, stroke } });
      }
      const held = (line.length && panel.held_out.map((name) => lineOf(run, name)).find((each) => each.length)) || [];
      if (held.length) {
        lines.push(held);
        series.push({ label: `${run.label}, held-out`, stroke, width: 1, dash: [3, 4], spanGaps: true, held: place, line: held,
          points: { show: true, size: 8, fill: () => color("panel"), stroke, width: 2 } });
      }
    });
    if (panel.band) legend.push(`band: ${panel.band.map((name) => name.split(/[/_]/).pop()).join(" to ")}`);
    if (series.some((each) => each.held !== undefined)) legend.push("circles: held-out data");
    return { title: panel.title, unit: panel.unit, metric: panel.metric, objective: panel.is_objective, columns: together(lines),
      series, bands, legend };
  }
  function stackOf(run, place) {
    const names = Object.keys(run.curves.phases);
    const sums = run.curves.steps.map(() => 0), columns = [];
    names.forEach((name) => {
      run.curves.phases[name].forEach((value, at) => { sums[at] += value || 0; });
      columns.push(sums.slice());
    });
    const series = [{}, { label: "whole step", stroke: () => color("text"), width: 1.3, points: { show: false }, spanGaps: true, run: place,
      line: lineOf(run, "time/step_s") }];
    const lines = [lineOf(run, "time/step_s")];
    // The highest first, so that each covers what is not its own.
    names.map((name, at) => [name, at]).reverse().forEach(([name, at]) => {
      lines.splice(lines.length - 1, 0, run.curves.steps.map((step, point) => [step, columns[at][point]]));
      series.splice(series.length - 1, 0, { label: name, stroke: () => phaseColor(name), fill: () => phaseColor(name), width: 0,
        points: { show: false } });
    });
    return { title: "Time of a step", unit: "s", metric: "time/step_s", columns: together(lines), series, bands: [], zero: true,
      legend: names.map((name) => [name, `var(--phase-${phasePlace(name)})`]) };
  }
  function timeChart() {
    if (runs.length === 1 && Object.keys(runs[0].curves.phases).length) return stackOf(runs[0], 0);
    return chartOf({ title: "Time of a step", unit: "s", metric: "time/step_s", band: null, held_out: [] });
  }
  // The values of a chart at a step, or at the end of each run.
  function tellChart(chart, now, step) {
    const parts = [];
    for (const each of chart.series) {
      const place = each.run === undefined ? each.held : each.run;
      if (place === undefined) continue;
      const points = each.line.filter((point) => point[1] !== null && (step === null || point[0] <= step));
      if (!points.length) continue;
      const [at, value] = points[points.length - 1];
      const text = each.held === undefined ? number(value) : `held-out ${number(value)}${at === step || step === null ? "" : ` (step ${at})`}`;
      parts.push(runs.length > 1 ? make("span", { style: `color: var(--run-${place % 6})` }, text) : make("span", {}, text));
    }
    fill(now, make("span", {}, step === null ? "last" : `step ${step}`), parts);
  }
  function describe(chart) {
    const parts = chart.series.filter((each) => each.run !== undefined).map((each) => {
      const points = each.line.filter((point) => point[1] !== null);
      if (!points.length) return "";
      const [first, last] = [points[0], points[points.length - 1]];
      return `${runs[each.run].label}: ${number(first[1])} at step ${first[0]}, ${number(last[1])} at step ${last[0]}`;
    });
    return `${chart.title}${chart.unit ? ` in ${chart.unit}` : ""}. ${parts.filter(Boolean).join("; ")}`;
  }
  function rangeOf(chart) {
    return (plot, low, high) => {
      if (low === null || high === null) return [0, 1];
      const least = Math.max(Math.abs(low), Math.abs(high)) * 0.05 || 0.05, middle = (low + high) / 2;
      const half = Math.max((high - low) / 2, least) * 1.1;
      if (chart.zero) return [0, high * 1.08 || 1];
      // A quantity that is never negative has no axis below zero.
      return [low >= 0 ? Math.max(0, middle - half) : middle - half, middle + half];
    };
  }
  function draw(chart, plotNode, now) {
    const axis = { stroke: () => color("soft"), grid: { stroke: () => color("line"), width: 1 }, ticks: { stroke: () => color("line"), width: 1 },
      font: "11px system-ui, sans-serif" };
    const plot = new uPlot({
      width: Math.max(160, plotNode.clientWidth), height: 190, legend: { show: false }, padding: [8, 12, 0, 0],
      scales: { x: { time: false, range: () => [0, lastStep + Math.max(0.3, lastStep * 0.015)] }, y: { range: rangeOf(chart) } },
      axes: [{ ...axis, size: 28, space: 44, incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] },
        { ...axis, size: 58, space: 34, values: (_, ticks) => ofAxis(ticks) }],
      cursor: { sync: { key: "steps", scales: ["x", null] }, points: { size: 6 }, drag: { x: false, y: false } },
      series: chart.series, bands: chart.bands,
      hooks: {
        setCursor: [(self) => { const { idx } = self.cursor; tellChart(chart, now, idx === null || idx === undefined ? null : self.data[0][idx]); }],
        draw: [(self) => {
          if (shown.step === null) return;
          const x = Math.round(self.valToPos(shown.step, "x", true)), { top, height } = self.bbox;
          self.ctx.save();
          self.ctx.strokeStyle = color("accent");
          self.ctx.setLineDash([5, 4]);
          self.ctx.lineWidth = devicePixelRatio;
          self.ctx.beginPath();
          self.ctx.moveTo(x, top);
          self.ctx.lineTo(x, top + height);
          self.ctx.stroke();
          self.ctx.restore();
        }],
      },
    }, chart.columns, plotNode);
    plot.over.addEventListener("click", () => choose(Math.round(plot.posToVal(plot.cursor.left, "x"))));
    return plot;
  }
  function addChart(chart) {
    const now = make("p.now", {}), plotNode = make("div.plot", { role: "img", "aria-label": describe(chart) });
    const legend = chart.legend.map((each) => Array.isArray(each)
      ? make("span", {}, make("i.swatch.box", { style: `color: ${each[1]}`, "aria-hidden": "true" }), each[0]) : make("span", {}, each));
    byId("charts").append(make(`article.chart${chart.objective ? ".objective" : ""}`, {},
      make("h3", { title: chart.metric }, chart.title, " ", make("span.unit", {}, chart.unit)), now, plotNode,
      legend.length ? make("div.legend", {}, legend) : null));
    tellChart(chart, now, null);
    const plot = draw(chart, plotNode, now);
    charts.push({ plot, plotNode });
    new ResizeObserver(() => { if (plotNode.clientWidth) plot.setSize({ width: plotNode.clientWidth, height: 190 }); }).observe(plotNode);
  }
  function showCurves() {
    if (runs.length > 1) {
      fill(byId("legend"), runs.map((run, place) =>
        make("span", {}, make("i.swatch", { style: `color: var(--run-${place % 6})`, "aria-hidden": "true" }), run.label)));
    }
    const all = [...new Set(runs.flatMap((run) => [...Object.keys(run.curves.metrics), ...Object.keys(run.curves.sparse)]))].sort();
    if (!all.length) {
      fill(byId("charts"), make("p.empty", {}, "No step is done yet."));
      return;
    }
    data.panels.forEach((panel) => addChart(chartOf(panel)));
    if (all.includes("time/step_s")) addChart(timeChart());
    const select = make("select", { id: "metric" }, all.map((name) => make("option", { value: name }, name)));
    const add = () => { addChart(chartOf({ title: select.value, unit: "", metric: select.value, band: null, held_out: [] })); };
    fill(byId("more"), make("label", { for: "metric" }, "Another metric", select), make("button", { type: "button", onclick: add }, "Add its chart"));
  }

  /* ---- a step ---- */
  const WAYS = {
    advantages: ["advantage", "advantage of the token: what the update made more or less likely"],
    apart: ["|Δ log-prob|", "distance between the sampler's and the trainer's log-probability"],
    ages: ["weight age", "updates that the weights lagged which sampled the token"],
    log_probs: ["log-prob", "the sampler's log-probability of the token"],
    none: ["none", ""],
  };
  let stepInput, stepBefore, stepAfter;
  function nearest(steps, wanted) {
    return steps.reduce((best, step) => (best === null || Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), null);
  }
  function choose(wanted) {
    const steps = stepsOf(shown.run);
    if (!steps.length) return;
    shown.step = nearest(steps, wanted);
    stepInput.value = shown.step;
    const place = steps.indexOf(shown.step);
    stepBefore.disabled = place === 0;
    stepAfter.disabled = place === steps.length - 1;
    const off = shown.step !== wanted && Number.isFinite(wanted) ? `Step ${wanted} is not on this page; the nearest one is shown. ` : "";
    const run = runs[shown.run], step = run.steps[shown.step], samples = step.samples;
    const seen = samples ? samples.groups.reduce((sum, group) => sum + group.responses.length, 0) : 0;
    const partial = samples && samples.ranks[0] < samples.ranks[1] ? `, from ${samples.ranks[0]} of ${samples.ranks[1]} ranks` : "";
    byId("step-note").textContent = off + (samples
      ? `Step ${shown.step}: ${count(samples.groups.length, "group")} of ${number(samples.num_groups)}, ${count(seen, "response")} of ${number(samples.num_samples)}${partial}.`
      : `Step ${shown.step}: no samples on this page.`);
    charts.forEach(({ plot }) => plot.redraw(false));
    showGroups(run, samples);
    showTimeline(step, run.planned);
  }
  function move(by) {
    const steps = stepsOf(shown.run), place = steps.indexOf(shown.step) + by;
    if (place >= 0 && place < steps.length) choose(steps[place]);
  }
  function showStepTools() {
    const tools = byId("step-tools");
    if (!runs.some((run) => Object.keys(run.steps).length)) {
      fill(byId("groups"), make("p.empty", {}, "No step is done yet."));
      return;
    }
    stepInput = make("input", { type: "number", id: "step-number", min: 0, max: lastStep, "aria-describedby": "step-note",
      onchange: () => { if (stepInput.value !== "") choose(Number(stepInput.value)); } });
    stepBefore = make("button", { type: "button", "aria-label": "Step before", onclick: () => move(-1) }, "◀");
    stepAfter = make("button", { type: "button", "aria-label": "Step after", onclick: () => move(1) }, "▶");
    const by = make("select", { id: "colors", onchange: () => { shown.by = by.value; choose(shown.step); } },
      Object.entries(WAYS).map(([way, [name]]) => make("option", { value: way }, name)));
    const which = make("select", { id: "which", onchange: () => { shown.run = Number(which.value); choose(shown.step); } },
      runs.map((run, place) => make("option", { value: place }, run.label)));
    fill(tools, runs.length > 1 ? make("label", { for: "which" }, "Run", which) : null,
      make("label", { for: "step-number" }, "Step", stepInput), make("div", {}, stepBefore, " ", stepAfter),
      make("label", { for: "colors" }, "Color tokens by", by), make("span.hint", {}, "keys ← →: step"));
    document.addEventListener("keydown", (event) => {
      const on = event.target.closest ? event.target.closest("input, select, [data-keys], .text, .table, pre") : null;
      if (on || event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.key === "ArrowLeft") move(-1);
      else if (event.key === "ArrowRight") move(1);
      else return;
      event.preventDefault();
    });
  }
  const NO_SAMPLES = ["sft", "dpo", "ipo", "kto", "reward-model"];
  function showGroups(run, samples) {
    const place = byId("groups");
    if (!samples) {
      const why = run.archive ? make("p.empty", {}, "This page has no samples of this step: the archive lacks it, or there was no room. A sample enters the archive when the next checkpoint is complete.")
        : NO_SAMPLES.includes(run.algorithm) ? make("p.empty", {}, `${run.algorithm} learns from given responses and samples none.`)
          : make("p.empty", {}, "This run has no archive of samples: it has no checkpoint yet, or ", make("code", {}, "rollout.archive"), " is false.");
      fill(place, why);
      return;
    }
    const responses = samples.groups.flatMap((group) => group.responses);
    const columnOf = (response) => (shown.by === "none" ? null : response[shown.by]);
    const known = responses.flatMap((response) => { const own = columnOf(response); return Array.isArray(own) ? ofNumbers(own) : ofNumbers([own]); });
    const most = Math.max(0, ...known.map(Math.abs));
    const told = make("p.token-told", { role: "status" }, "Point at a token, or focus a response and press ← →, to see its numbers.");
    const longest = Math.max(...responses.map((response) => response.tokens.length));
    const width = longest <= 16 ? 136 : longest <= 60 ? 230 : 340;
    const side = Math.max(...samples.groups.map((group) => group.responses.length));
    const wide = longest > 60 || side > 4;
    const groups = samples.groups.map((group) => groupOf(group, samples, most, told));
    fill(place, scaleOf(known, most), told, make(`div.list${wide ? ".wide" : ""}`, { style: `--width: ${width}px; --card: ${Math.max(200, side * (width + 8))}px` }, groups));
  }
  function scaleOf(known, most) {
    const [name, meaning] = WAYS[shown.by];
    if (shown.by === "none") return make("div.scale", {}, "Tokens are not colored.");
    if (!known.length) {
      const why = shown.by === "apart" ? "not recorded: an algorithm that makes one update from each batch computes no log-probabilities before it"
        : "not recorded for this step";
      return make("div.scale", {}, `${name}: ${why}.`);
    }
    const tone = shown.by === "ages" ? "old" : "much", left = shown.by === "advantages" ? "minus" : null;
    const bar = make("i", { "aria-hidden": "true", style: `background: linear-gradient(to right, rgba(var(--${left || tone}), ${left ? 0.6 : 0}), ${left ? "transparent, rgba(var(--plus), .6)" : `rgba(var(--${tone}), .6)`})` });
    const [low, high] = left ? [`−${number(most, 3)}`, `+${number(most, 3)}`] : shown.by === "log_probs" ? ["0", `−${number(most, 3)}`] : ["0", number(most, 3)];
    return make("div.scale", {}, `${name} `, low, bar, high, make("span", {}, meaning));
  }
  function background(value, most) {
    if (value === null || value === undefined || !most) return "";
    const strength = (0.06 + 0.54 * Math.min(1, Math.abs(value) / most)).toFixed(3);
    if (value === 0) return "";
    const tone = shown.by === "advantages" ? (value > 0 ? "plus" : "minus") : shown.by === "ages" ? "old" : "much";
    return `rgba(var(--${tone}), ${strength})`;
  }
  const at = (column, place) => (Array.isArray(column) ? column[place] : column);
  function textOf(tokens, style, each) {
    return tokens.map((token, place) => {
      if (typeof token === "number") return make("span.cut", {}, ` … ${number(token)} tokens … `);
      const special = Array.isArray(token), text = special ? token[0] : token;
      const node = make(`span.tok${special ? ".special" : ""}`, {}, text);
      const back = style(place);
      if (back) node.style.background = back;
      if (each) each(node, place);
      return node;
    });
  }
  function groupOf(group, samples, most, told) {
    const size = group.responses.length;
    const of = group.num_samples > 1 ? [`mean reward ${number(group.mean, 3)}`] : [];
    if (group.num_samples > size) of.push(`${size} of ${group.num_samples} responses`);
    const prompt = make("p.text.prompt", { "aria-label": "Prompt", tabindex: group.prompt.length > 200 ? 0 : null }, textOf(group.prompt, () => ""));
    return make("article.group", { "aria-label": [`Group of prompt ${group.prompt_index}`, ...of].join(", ") },
      make("div.title", {}, make("h3", {}, `Prompt ${group.prompt_index}`), make("span.of", {}, of.join(" · "))), prompt,
      make("div.responses", {}, group.responses.map((response) => responseOf(response, most, told))));
  }
  function responseOf(response, most, told) {
    const advantages = response.advantages, mean = Array.isArray(advantages)
      ? ofNumbers(advantages).reduce((sum, value, _, all) => sum + value / all.length, 0) : advantages;
    const facts = [make("span", {}, "reward ", make("b", {}, number(response.score, 3)))];
    if (mean !== undefined && mean !== null) facts.push(make("span", {}, `advantage ${signed(mean)}`));
    facts.push(make("span", {}, `${count(response.num_tokens, "token")}${response.finish === "length" ? ", cut" : ""}`));
    const places = new Map(), column = response[shown.by];
    const text = make("p.text", {}, textOf(response.tokens, (place) => background(at(column, place), most), (node, place) => places.set(node, place)));
    const nodes = [...places.keys()], cut = response.tokens.findIndex((token) => typeof token === "number");
    const numberOf = (place) => (cut < 0 || place < cut ? place + 1 : place + response.tokens[cut]);
    let here = -1;
    const tell = (place) => {
      const parts = [`token ${numberOf(place)} of response ${response.index}`, JSON.stringify([response.tokens[place]].flat()[0])];
      const add = (name, values, show) => { const value = at(values, place); if (value !== null && value !== undefined) parts.push(`${name} ${show(value)}`); };
      add("advantage", response.advantages, signed);
      add("log-prob", response.log_probs, (value) => number(value, 3));
      add("|Δ log-prob|", response.apart, (value) => number(value, 3));
      add("weight age", response.ages, (value) => count(value, "update"));
      told.textContent = parts.join(" · ");
    };
    const go = (place) => {
      if (place < 0 || place >= nodes.length) return;
      if (here >= 0) nodes[here].classList.remove("here");
      here = place;
      nodes[here].classList.add("here");
      nodes[here].scrollIntoView({ block: "nearest" });
      tell(places.get(nodes[here]));
    };
    return make("article.response", {
      tabindex: 0, "data-keys": true, "aria-label": `Response ${response.index}, reward ${number(response.score, 3)}`,
      onkeydown: (event) => {
        if (event.key === "ArrowRight") go(here + 1);
        else if (event.key === "ArrowLeft") go(here - 1);
        else return;
        event.preventDefault();
      },
      onblur: () => { if (here >= 0) nodes[here].classList.remove("here"); here = -1; },
      onmouseover: (event) => { if (places.has(event.target)) tell(places.get(event.target)); },
    }, make("div.told", {}, facts), text);
  }

  /* ---- timeline ---- */
  const phases = [...new Set(runs.flatMap((run) => Object.keys(run.curves.phases)))].filter((name) => name !== "other phases");
  function phasePlace(name) { const place = phases.indexOf(name); return place < 0 || place > 5 ? 6 : place; }
  function phaseColor(name) { return color(`phase-${phasePlace(name)}`); }
  const SVG = "http://www.w3.org/2000/svg";
  function svg(tag, given, text) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(given)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }
  const plannedText = (planned, name) => planned && planned.phases_s[name] ? ` · planned ${number(planned.phases_s[name], 3)} s` : "";
  function showTimeline(step, planned) {
    const parts = [];
    if (step.timeline) parts.push(...lanesOf(step.timeline));
    else parts.push(make("p.empty", {}, "This page has no timeline of this step."));
    const seconds = Object.entries(step.phases).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
    if (seconds.length) {
      const whole = step.step_s || seconds[0][1];
      parts.push(make("h3", { style: "margin-top: 1rem" }, "Time of each phase ", make("span.hint", {}, `of ${duration(step.step_s)}; of the rank that took longest`)));
      parts.push(make("div.phases", {}, seconds.flatMap(([name, value]) => [
        make("span", {}, name),
        make("span.measure", { "aria-hidden": "true" }, make("i", { style: `width: ${Math.min(100, 100 * value / whole)}%; background: var(--phase-${phasePlace(name)})` })),
        make("span.seconds", {}, `${number(value, 3)} s · ${Math.round(100 * value / whole)} %${plannedText(planned, name)}`)])));
      if (planned) parts.push(make("p.hint", {}, `Planned: a step of ${duration(planned.step_s)} on ${planned.hardware}, estimated for the mean lengths of the latest steps.`));
    }
    fill(byId("timeline-body"), parts);
  }
  // The next of 1, 2, 5, 10, 20 …
  function roundUp(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return power * [1, 2, 5, 10].find((each) => each * power >= value * 0.999);
  }
  function lanesOf(timeline) {
    const ranks = Object.keys(timeline.ranks).map(Number).sort((a, b) => a - b);
    // The clocks of nodes differ, and some ranks begin before the lowest one has.
    const every = ranks.flatMap((rank) => timeline.ranks[rank]);
    const begin = every.reduce((least, [, start]) => Math.min(least, start), 0);
    const end = every.reduce((most, [, start, length]) => Math.max(most, start + length), timeline.seconds * 1000);
    const left = 52, row = 22, height = ranks.length * row + 22;
    const told = make("p.span-told", { role: "status" }, "Point at a span, or focus the timeline and press the arrow keys.");
    const box = make("div.lanes", { tabindex: 0, role: "group", "data-keys": true,
      "aria-label": `Timeline of step ${shown.step}: ${count(ranks.length, "rank")}, ${duration(timeline.seconds)}. Arrow keys move between spans.` });
    const picture = svg("svg", { height, "aria-hidden": "true" });
    const rects = new Map();
    const sorted = new Map(ranks.map((rank) => [rank, [...timeline.ranks[rank]].sort((a, b) => a[1] - b[1])]));
    const tell = (rank, span) => {
      const [kind, name, phase] = timeline.names[span[0]];
      const what = kind === "move" ? "move of data" : kind === "control" ? "decision" : phase;
      told.textContent = `rank ${rank} · ${name} · ${number(span[2] / 1000, 3)} s from ${number(span[1] / 1000, 3)} s · ${what}`;
    };
    const drawAll = () => {
      const width = Math.max(200, box.clientWidth - 20), scale = (width - left - 6) / (end - begin);
      picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
      picture.replaceChildren();
      rects.clear();
      const apart = roundUp((end - begin) / Math.max(2, Math.min(10, Math.floor(width / 100))));
      for (let moment = 0; moment <= end; moment += apart) {
        const x = left + scale * (moment - begin);
        picture.append(svg("line", { class: "grid", x1: x, x2: x, y1: 0, y2: ranks.length * row }));
        picture.append(svg("text", { x: Math.min(x, width - 2), y: height - 6, "text-anchor": x > width - 30 ? "end" : "middle" }, `${number(moment / 1000, 3)} s`));
      }
      ranks.forEach((rank, place) => {
        picture.append(svg("text", { x: 0, y: place * row + 15 }, `rank ${rank}`));
        sorted.get(rank).forEach((span) => {
          const [kind, , phase] = timeline.names[span[0]], waits = kind === "move" || kind === "control";
          const node = svg("rect", { x: left + (span[1] - begin) * scale, y: place * row + (waits ? 7 : 3), width: Math.max(0.7, span[2] * scale), height: waits ? 8 : 16, rx: 1,
            fill: waits ? "var(--line)" : `var(--phase-${phasePlace(phase)})` });
          node.addEventListener("mouseover", () => tell(rank, span));
          rects.set(span, node);
          picture.append(node);
        });
      });
    };
    let lane = 0, place = -1;
    const go = (toLane, toPlace) => {
      const spans = sorted.get(ranks[toLane]);
      if (!spans || toPlace < 0 || toPlace >= spans.length) return;
      picture.querySelectorAll(".here").forEach((node) => node.classList.remove("here"));
      [lane, place] = [toLane, toPlace];
      rects.get(spans[place]).classList.add("here");
      tell(ranks[lane], spans[place]);
    };
    box.addEventListener("keydown", (event) => {
      const spans = sorted.get(ranks[lane]), start = place < 0 ? 0 : spans[place][1];
      const across = (to) => { const other = sorted.get(ranks[to]); if (other) { const next = other.findIndex((span) => span[1] + span[2] >= start); go(to, next < 0 ? other.length - 1 : next); } };
      if (event.key === "ArrowRight") go(lane, place + 1);
      else if (event.key === "ArrowLeft") go(lane, place - 1);
      else if (event.key === "ArrowDown") across(lane + 1);
      else if (event.key === "ArrowUp") across(lane - 1);
      else return;
      event.preventDefault();
    });
    box.append(picture);
    new ResizeObserver(drawAll).observe(box);
    const used = new Set(timeline.names.map(([, , phase]) => phase));
    const legend = make("div.legend", {}, phases.filter((name) => used.has(name) && phasePlace(name) < 6).map((name) =>
      make("span", {}, make("i.swatch.box", { style: `color: var(--phase-${phasePlace(name)})`, "aria-hidden": "true" }), name)),
    [...used].some((name) => phasePlace(name) === 6 && name !== "move" && name !== "control")
      ? make("span", {}, make("i.swatch.box", { style: "color: var(--phase-6)", "aria-hidden": "true" }), "other phases") : null,
    make("span", {}, make("i.swatch.box", { style: "color: var(--line)", "aria-hidden": "true" }), "moves and decisions"));
    const some = ranks.length < timeline.num_ranks ? make("p.hint", {}, `${ranks.length} of ${timeline.num_ranks} ranks are shown.`) : null;
    return [make("p.hint", {}, `Step ${shown.step} of ${runs[shown.run].label}, ${duration(timeline.seconds)}.`), legend, some, box, told];
  }

  /* ---- starts, recipe, the rest ---- */
  function table(head, rows, label) {
    return make("div.table", { tabindex: 0, role: "region", "aria-label": label },
      make("table", {}, make("thead", {}, make("tr", {}, head.map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, rows.map((row) => make("tr", {}, row.map((cell, place) => make(place === row.length - 1 ? "td.wide" : "td", { "data-head": head[place] }, cell)))))));
  }
  function showStarts() {
    const body = byId("starts-body");
    const many = runs.length > 1, words = { finished: "done", requeue: "saved and stopped", failed: "failed", killed: "killed" };
    const rows = runs.flatMap((run) => run.starts.map((start) => [
      ...(many ? [run.label] : []), String(start.number), start.began, start.step === null ? "the beginning" : `step ${start.step}`,
      `${start.ranks}${start.hosts.length ? ` on ${start.hosts.join(", ")}` : ""}`,
      start.seconds === null ? "–" : duration(start.seconds),
      `${words[start.outcome] || (run.facts.state === "silent" ? "no sign of life" : "under way")}${start.detail ? `: ${start.detail}` : ""}${start.job_id ? ` (job ${start.job_id})` : ""}`]));
    if (rows.length) body.append(table([...(many ? ["run"] : []), "start", "began", "from", "ranks", "lasted", "how it ended"], rows, "Starts and stops"));
    else body.append(make("p.empty", {}, "No start is recorded."));
    runs.forEach((run) => {
      const last = run.starts[run.starts.length - 1];
      if (!last || !Object.keys(last.layouts).length) return;
      body.append(make("details", {}, make("summary", {}, `Layouts of the last start${many ? ` of ${run.label}` : ""}`),
        table(["model", "layout"], Object.entries(last.layouts), "Layouts")));
    });
  }
  function showRecipes() {
    const body = byId("recipe-body");
    if (runs.length > 1 && data.differences.length) {
      body.append(make("h3", {}, "Keys that differ"), table(["key", ...runs.map((run) => run.label)],
        data.differences.map((row) => row.map((value) => (value === null ? "not set" : value))), "Keys that differ between the recipes"));
    } else if (runs.length > 1 && runs.every((run) => run.recipe)) {
      body.append(make("p.hint", {}, "The recipes have no key that differs."));
    }
    runs.forEach((run) => {
      if (!run.recipe) body.append(make("p.empty", {}, `${run.label}: its starts kept no recipe.`));
      else body.append(make("details", { open: runs.length === 1 }, make("summary", {}, runs.length > 1 ? `Recipe of ${run.label}` : "Every key that is set"),
        make("pre.recipe", { tabindex: 0, "aria-label": `Recipe of ${run.label}` }, run.recipe)));
    });
  }
  function showLeftOut() {
    const rows = runs.flatMap((run) => run.left_out.map((text) => make("li", {}, runs.length > 1 ? `${run.label}: ${text}` : text)));
    if (rows.length) byId("left-out-body").append(make("ul", {}, rows));
    else byId("left-out").hidden = true;
    byId("foot").textContent = `Written on ${data.written} by hybridflow ${data.version}. Charts by uPlot (MIT).`;
  }

  showRuns();
  showCurves();
  showStepTools();
  showStarts();
  showRecipes();
  showLeftOut();
  const firstWithSamples = runs.findIndex((run) => Object.values(run.steps).some((step) => step.samples));
  shown.run = Math.max(0, firstWithSamples);
  if (byId("which")) byId("which").value = shown.run;
  const sampled = stepsOf(shown.run).filter((step) => runs[shown.run].steps[step].samples);
  const begin = sampled.length ? sampled[sampled.length - 1] : stepsOf(shown.run).pop();
  if (begin !== undefined) choose(begin);
  dark.addEventListener("change", () => { charts.forEach(({ plot }) => plot.redraw(false)); });
})();
