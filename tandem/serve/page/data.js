// Data: what became of every row, and some rows token by token.

import { runs } from "./api.js";
import { choose, field, h, nothing, show } from "./dom.js";
import { pickRun } from "./runs.js";
import { maskedText } from "./tokens.js";

const KINDS = { texts: "Supervised fine-tuning", pairs: "Reward model: pairs", dpo_pairs: "Preference optimization: pairs", labelled: "Labelled answers", prompts: "Prompts to answer", ptx: "Mixture texts" };

export async function dataView(holder, query, { remember, left }) {
  const list = (await runs.list()).runs;
  if (!list.length) { show(holder, h("h1", {}, "Data"), nothing("There is no run in this folder yet.")); return; }
  let run = pickRun(list, query.get("run")).id, kind = query.get("kind") || "";
  const tools = h("div", { class: "toolbar" }), body = h("div", {});
  show(holder, h("h1", {}, "Data"), tools, body);

  async function draw() {
    const found = await runs.of(run, "data");
    if (left.gone) return;
    remember({ run, kind });
    show(tools, field("Run", choose(list.map((one) => one.id), run, (value) => { run = value; draw(); })));
    const sets = found.ledger.datasets || [];
    const kinds = Object.keys(found.rows).filter((name) => found.rows[name].length);
    if (!sets.length && !kinds.length) { show(body, nothing("This run has not read its data yet.")); return; }
    if (!kinds.includes(kind)) kind = kinds[0] || "";
    const rows = h("div", {});
    const drawRows = () => show(rows, (found.rows[kind] || []).map(rowPanel));
    show(body, h("h2", {}, "What became of every row"), sets.map(ledger),
      kinds.length ? [h("h2", {}, "Rows as tokens"), h("p", { class: "soft small" }, h("span", { class: "token learned" }, "Marked tokens"), " are learned; ", h("span", { class: "token context" }, "the others"), " are only read."),
        h("div", { class: "toolbar" }, field("Trained on by", choose(kinds.map((name) => [name, KINDS[name] || name]), kind, (value) => { kind = value; remember({ run, kind }); drawRows(); }))), rows] : "");
    drawRows();
  }

  function rowPanel(row) {
    const names = row.sequences.length === 2 ? ["preferred", "rejected"] : row.sequences.map((_, i) => (row.sequences.length > 1 ? `answer ${i + 1}` : ""));
    return h("article", { class: "panel" }, h("p", { class: "soft small" }, `${row.dataset}, line ${row.line}`), row.sequences.map((one, i) => h("div", { class: "sequence" },
      names[i] ? h("h3", {}, names[i]) : "", maskedText(one.tokens, one.learned, `${names[i] || "row"}, tokens`),
      h("p", { class: "soft small" }, `${one.num_tokens} tokens, ${one.learned.reduce((a, b) => a + b, 0)} learned${one.num_tokens > one.tokens.length ? ` of the first ${one.tokens.length} shown` : ""}`))));
  }

  function ledger(set) {
    const entries = (counts) => Object.entries(counts || {}).filter(([, n]) => (typeof n === "object" ? n.count : n));
    const items = (title, rows) => (rows.length ? h("div", {}, h("h4", {}, title), h("ul", { class: "counts" }, rows)) : "");
    const total = set.rows || 0;
    const bar = (n) => { const fill = h("span", { class: "fill" }); fill.style.width = `${total ? (100 * n) / total : 0}%`; return h("span", { class: "meter", "aria-hidden": "true" }, fill); };
    return h("article", { class: "panel" }, h("div", { class: "head" }, h("h3", {}, set.name), h("span", { class: "soft small" }, `${total.toLocaleString("en")} rows read`)), h("p", { class: "soft small mono" }, set.path),
      h("div", { class: "columns" },
        items("Used", entries(set.used).map(([name, n]) => h("li", {}, bar(n), h("b", {}, n.toLocaleString("en")), ` ${name.replace("heldout", "held-out")}`))),
        items("Dropped", entries(set.dropped).map(([reason, drop]) => h("li", {}, bar(drop.count), h("b", {}, drop.count.toLocaleString("en")), ` ${reason}`, drop.first?.length ? h("span", { class: "soft small" }, ` (${drop.first.slice(0, 5).join(", ")}${drop.count > drop.first.length ? ", …" : ""})`) : ""))),
        items("Not used", entries(set.unused).map(([reason, n]) => h("li", {}, bar(n), h("b", {}, n.toLocaleString("en")), ` ${reason}`))),
        items("Notes", [["duplicates", set.duplicates], ["blank lines", set.blank_lines], ...entries(set.notes), ...entries(set.extra_copies).map(([name, n]) => [`extra copies by weight in ${name}`, n])].filter(([, n]) => n).map(([what, n]) => h("li", {}, h("b", {}, n.toLocaleString("en")), ` ${what}`)))));
  }
  await draw();
}
