// Runs: live curves of any metric, several runs overlaid, alarms, the frontier, histograms.

import { runs } from "./api.js";
import { frontierChart, histogramChart, intervalBar, lineChart } from "./charts.js";
import { choose, field, h, newId, nothing, show } from "./dom.js";
import { number, percent, short, when, withUnit } from "./format.js";

const COLORS = 6, EVERY = 4000;
const FIRST = {
  rl: ["reward_before_penalty", "heldout_reward", "kl", "heldout_kl", "response_tokens", "eos_rate", "entropy", "explained_variance"],
  pairs: ["loss", "heldout_loss", "accuracy", "heldout_accuracy", "margin", "heldout_margin"],
  supervised: ["loss", "heldout_loss", "heldout_perplexity", "grad_norm"],
};
const ANSWERS = { reward: ["Rewards", "reward"], length: ["Lengths", "tokens"], kl: ["KL of answers", "nats"], advantage: ["Advantages", "as the update reads them"] };

/** The run to show first: the one named, else the latest. */
export function pickRun(list, wanted) {
  return list.find((run) => run.id === wanted) || list[0];
}

/** The stage to show first: the one named, else the last with its own answers, else the last. */
export function pickStage(run, wanted, family = "") {
  const stages = family ? run.stages.filter((stage) => stage.family === family) : run.stages;
  return stages.find((stage) => stage.name === wanted) || [...stages].reverse().find((stage) => stage.family === "rl") || stages.at(-1);
}

export async function runsView(holder, query, { remember, left }) {
  let list = (await runs.list()).runs;
  if (!list.length) {
    show(holder, h("h1", {}, "Runs"), nothing("There is no run in this folder yet. A run appears here as soon as it has written its configuration."));
    return;
  }
  const withStages = list.filter((run) => run.stages.length);
  if (!withStages.length) {
    show(holder, h("h1", {}, "Runs"), nothing("The runs here have not logged a step yet."));
    return;
  }
  const wanted = (query.get("runs") || "").split(",").filter((id) => withStages.some((run) => run.id === id));
  const state = {
    chosen: wanted.length ? wanted : [withStages[0].id],
    stage: query.get("stage") || pickStage(withStages[0]).name,
    metrics: (query.get("metrics") || "").split(",").filter(Boolean),
    smoothing: Number(query.get("smooth") || 0.5), step: null,
  };
  const color = (id) => (withStages.findIndex((run) => run.id === id) % COLORS) + 1;
  const parts = { list: h("div", {}), notices: h("div", {}), charts: h("div", { class: "figures" }), frontier: h("div", {}), histograms: h("div", {}), alarms: h("div", {}), models: h("div", {}), picker: h("div", { class: "picker" }) };
  const keep = () => remember({ runs: state.chosen.join(","), stage: state.stage, metrics: state.metrics.join(","), smooth: state.smoothing });

  const stageSelect = h("div", {}), stepHolder = h("div", { class: "field grow" });
  const smoothing = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smoothing, on: { input: () => { state.smoothing = Number(smoothing.value); keep(); drawCharts(); } } });
  let names = [], series = new Map(), alarms = new Map(), histogramSteps = [];

  function drawList() {
    show(parts.list, h("ul", { class: "runlist" }, list.map((run) => {
      const box = h("input", { type: "checkbox", id: newId("run"), checked: state.chosen.includes(run.id), disabled: !run.stages.length,
        on: { change: () => {
          state.chosen = box.checked ? [...state.chosen, run.id] : state.chosen.filter((id) => id !== run.id);
          keep(); drawStages(); load();
        } } });
      return h("li", {}, box, h("label", { for: box.id }, h("span", { class: `swatch n${run.stages.length ? color(run.id) : 6}`, "aria-hidden": "true" }), h("b", {}, run.id),
        h("span", { class: "soft small" }, ` ${run.stages.map((stage) => `${stage.name} ${stage.steps}${stage.finished ? " ✓" : "…"}`).join(" · ") || "not begun"}`),
        run.alarms ? h("span", { class: "badge warn" }, `${run.alarms} alarm${run.alarms > 1 ? "s" : ""}`) : "",
        h("span", { class: "soft small right" }, when(run.updated))));
    })));
  }

  function drawStages() {
    const known = [...new Map(list.filter((run) => state.chosen.includes(run.id)).flatMap((run) => run.stages).map((stage) => [stage.name, stage])).values()];
    if (known.length && !known.some((stage) => stage.name === state.stage)) state.stage = known.at(-1).name;
    show(stageSelect, field("Stage", choose(known.map((stage) => [stage.name, stage.title]), state.stage, (value) => { state.stage = value; state.metrics = []; state.step = null; keep(); load(); })));
  }

  const having = () => state.chosen.filter((id) => list.find((run) => run.id === id)?.stages.some((stage) => stage.name === state.stage));

  function drawPicker() {
    const groups = new Map();
    for (const metric of names) {
      const group = metric.group || "main";
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(metric);
    }
    const open = parts.picker.querySelector("details")?.open;
    show(parts.picker, h("details", { open: open }, h("summary", {}, `Metrics (${state.metrics.length} of ${names.length} shown)`),
      h("div", { class: "metricgroups" }, [...groups].map(([group, metrics]) => h("fieldset", {}, h("legend", {}, group), metrics.map((metric) => {
        const box = h("input", { type: "checkbox", id: newId("metric"), checked: state.metrics.includes(metric.name), on: { change: () => {
          state.metrics = box.checked ? [...state.metrics, metric.name] : state.metrics.filter((name) => name !== metric.name);
          keep(); load();
        } } });
        return h("div", { class: "check" }, box, h("label", { for: box.id, title: metric.meaning }, metric.title, h("span", { class: "soft small" }, ` ${withUnit(metric.last, metric.unit)}`)));
      }))))));
  }

  function drawCharts() {
    const focused = document.activeElement?.closest?.(".figures");
    if (focused) return;  // someone reads a chart by keyboard: leave it as it is
    // A held-out line is drawn with its training line only if they are one scale.
    const grouped = new Map();
    for (const name of state.metrics) {
      const base = name.replace(/^heldout_/, "");
      const key = name.startsWith("heldout_") && state.metrics.includes(base) && base !== "reward" ? base : name;
      const together = key === "reward_before_penalty" || name === "heldout_reward" && state.metrics.includes("reward_before_penalty") ? "reward_before_penalty" : key;
      if (!grouped.has(together)) grouped.set(together, []);
      grouped.get(together).push(name);
    }
    const figures = [...grouped.values()].map((members) => {
      const about = names.find((metric) => metric.name === members[0]);
      const unit = about?.unit || "";
      const scale = unit === "share" ? 100 : 1;
      const lines = [];
      for (const id of having()) {
        for (const name of members) {
          const found = series.get(id)?.[name];
          if (!found?.steps.length) continue;
          const heldout = name.startsWith("heldout_");
          const label = [having().length > 1 ? id : "", members.length > 1 || having().length === 1 ? (heldout ? "held-out" : "training") : ""].filter(Boolean).join(", ");
          lines.push({ label, marks: heldout, color: having().length > 1 ? color(id) : heldout ? 2 : 1, points: found.steps.map((step, i) => [step, scale * number(found.values[i])]) });
        }
      }
      const noted = having().flatMap((id) => (alarms.get(id) || []).map((alarm) => ({ ...alarm, step: number(alarm.step) })));
      const title = members.length > 1 ? about?.title.replace(/^Held-out (.)/, (_, c) => c.toUpperCase()) : about?.title || members[0];
      return lineChart({ title, unit: unit === "share" ? "%" : ["ratio", "norm"].includes(unit) ? "" : unit, about: about?.meaning || "", series: lines, alarms: noted, smoothing: state.smoothing });
    });
    show(parts.charts, figures.filter(Boolean));
    if (!parts.charts.childElementCount) show(parts.charts, nothing("No number of these metrics has been logged in this stage."));
  }

  function drawAlarms() {
    const rows = having().flatMap((id) => (alarms.get(id) || []).map((alarm) => [id, alarm]));
    show(parts.alarms, h("h2", {}, "Alarms"), rows.length
      ? h("div", { class: "panel" }, rows.map(([id, alarm]) => h("div", { class: "alarm" }, h("div", {}, h("b", {}, alarm.alarm), h("br"), h("span", { class: "soft small" }, `${having().length > 1 ? `${id}, ` : ""}step ${alarm.step}`)),
        h("div", {}, alarm.advice, h("br"), h("span", { class: "soft small" }, `${short(alarm.value)}; the threshold is ${short(alarm.threshold)}`)))))
      : h("p", { class: "soft" }, "No alarm was raised in this stage."));
  }

  async function drawFrontier() {
    const found = await Promise.all(having().map((id) => runs.of(id, "frontier", { stage: state.stage })));
    if (left.gone) return;
    const lines = found.map((one, i) => ({ label: having()[i], color: color(having()[i]), points: one.points.map((p) => ({ ...p, kl: number(p.kl), reward: number(p.reward) })) }));
    const heldout = found.some((one) => one.points.some((point) => point.heldout));
    const chart = frontierChart({ title: "Reward against KL", series: lines,
      about: `${heldout ? "Held-out answers" : "Training answers"}, before penalties and clips; up and to the left is better. Rings are checkpoints on disk; numbers are steps.` });
    show(parts.frontier, chart ? [h("h2", {}, "Frontier"), h("div", { class: "figures" }, chart)] : "");
  }

  async function drawHistograms() {
    const ids = having();
    const found = await Promise.all(ids.map((id) => runs.of(id, "histograms", { stage: state.stage, step: state.step ?? undefined })));
    if (left.gone) return;
    const steps = [...new Set(found.flatMap((one) => one.steps))].sort((a, b) => a - b);
    if (!steps.length) { show(parts.histograms, ""); return; }
    histogramSteps = steps;
    const at = state.step ?? steps.at(-1);
    let slider = parts.histograms.querySelector("input[type=range]");
    if (!slider || Number(slider.max) !== steps.length - 1) {
      slider = h("input", { type: "range", min: 0, max: steps.length - 1, value: Math.max(0, steps.indexOf(at)), on: { input: () => {
        const place = Number(slider.value);
        state.step = place === steps.length - 1 ? null : histogramSteps[place];
        drawHistograms();
      } } });
      show(stepHolder, field("Step", slider), h("output", { class: "hint" }));
      show(parts.histograms, h("h2", {}, "Answers of a step"), h("div", { class: "toolbar" }, stepHolder), h("div", { class: "figures" }));
    }
    stepHolder.querySelector("output").textContent = `step ${at} of ${steps.at(-1)}${state.step === null ? ", the latest" : ""}`;
    const figures = found.flatMap((one, i) => Object.entries(ANSWERS).filter(([key]) => one.histograms[key]).map(([key, [title, unit]]) =>
      histogramChart({ title: ids.length > 1 ? `${title}, ${ids[i]}` : title, unit, histogram: one.histograms[key], color: color(ids[i]) })));
    show(parts.histograms.querySelector(".figures"), figures);
  }

  async function drawModels() {
    const found = await Promise.all(state.chosen.map((id) => runs.of(id)));
    if (left.gone) return;
    show(parts.notices, found.flatMap((run) => run.notices.map((notice) => h("p", { class: "notice" }, found.length > 1 ? `${run.id}: ${notice}` : notice))));
    if (parts.models.contains(document.activeElement)) return;  // someone reads a table by keyboard
    show(parts.models, found.map((run) => {
      const rates = run.win_rates || [];
      if (!rates.length) return "";
      return [h("h2", {}, `Win rates, ${run.id}`), h("p", { class: "soft small" }, "Share of held-out prompts whose answer (where a model has several, their mean) scores higher; a tie counts half. The interval is Wilson's at 95 %."),
        h("div", { class: "panel scroll", tabindex: 0, role: "group", "aria-label": "Win rates" }, h("table", {}, h("thead", {}, h("tr", {}, ["model", "against", "wins, ties, losses", "win rate", "interval"].map((head) => h("th", { scope: "col" }, head)))),
          h("tbody", {}, rates.map((rate) => h("tr", {}, h("th", { scope: "row" }, rate.model), h("td", {}, rate.against), h("td", {}, `${rate.wins}, ${rate.ties}, ${rate.losses}`),
            h("td", {}, `${percent(rate.rate)} (${percent(rate.low)} to ${percent(rate.high)})`), h("td", {}, intervalBar(rate)))))))];
    }));
  }

  async function load(all = true) {
    const ids = having();
    const listed = await Promise.all(ids.map((id) => runs.of(id, "metrics", { stage: state.stage })));
    names = [...new Map(listed.flatMap((one) => one.metrics).map((metric) => [metric.name, metric])).values()];
    if (!state.metrics.length) {
      const family = list.flatMap((run) => run.stages).find((stage) => stage.name === state.stage)?.family;
      state.metrics = (FIRST[family] || []).filter((name) => names.some((metric) => metric.name === name));
      if (!state.metrics.length) state.metrics = names.slice(0, 6).map((metric) => metric.name);
    }
    const points = await Promise.all(ids.map((id) => runs.of(id, "metrics", { stage: state.stage, names: state.metrics.slice(0, 64).join(",") })));
    const raised = await Promise.all(ids.map((id) => runs.of(id, "alarms", { stage: state.stage })));
    if (left.gone) return;
    series = new Map(ids.map((id, i) => [id, points[i].series]));
    alarms = new Map(ids.map((id, i) => [id, raised[i].alarms]));
    drawPicker();
    drawCharts();
    drawAlarms();
    await drawFrontier();
    if (all || state.step === null) await drawHistograms();
    await drawModels();
  }

  show(holder, h("h1", {}, "Runs"), parts.list, parts.notices,
    h("div", { class: "toolbar" }, stageSelect, h("div", { class: "grow" }, field("Smoothing", smoothing))),
    parts.picker, h("h2", { class: "sr" }, "Curves"), parts.charts, parts.frontier, parts.histograms, parts.models, parts.alarms);
  drawList();
  drawStages();
  await load();
  let version = JSON.stringify(list);
  const timer = window.setInterval(async () => {
    if (document.hidden) return;
    try {
      list = (await runs.list()).runs;
      const now = JSON.stringify(list);
      if (now === version || left.gone) return;
      version = now;
      if (!parts.list.contains(document.activeElement)) drawList();
      await load(false);
    } catch { /* the next time */ }
  }, EVERY);
  left.stop = () => window.clearInterval(timer);
}
