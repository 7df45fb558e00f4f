// The page's views, chosen by the part of the address after #.

import { apiKey, keepKey } from "./api.js";
import { button, field, h, nothing, say, show } from "./dom.js";
import { chatView } from "./chat.js";
import { dataView } from "./data.js";
import { rolloutsView } from "./rollouts.js";
import { runsView } from "./runs.js";
import { votesView } from "./votes.js";

const VIEWS = {
  chat: ["Chat", chatView], votes: ["Votes", votesView], runs: ["Runs", runsView],
  rollouts: ["Rollouts", rolloutsView], data: ["Data", dataView],
};
const main = document.getElementById("view");
let leave = null, name = "";

/** {view, query} of the address. */
function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path in VIEWS ? path : "chat", query: new URLSearchParams(query || "") };
}

/** Change the address's query without a new view: {key: value}, empty ones removed. */
export function remember(view, values) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) if (value !== undefined && value !== null && value !== "") query.set(key, value);
  const text = query.toString();
  history.replaceState(null, "", `#/${view}${text ? `?${text}` : ""}`);
}

async function route() {
  const { view, query } = address();
  leave?.();
  leave = null;
  const [title, make] = VIEWS[view];
  document.title = `${title} · Tandem`;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const holder = h("div", { class: `view ${view}` });
  show(main, holder);
  if (name && name !== view) { say(""); main.focus({ preventScroll: true }); }
  name = view;
  const left = { gone: false };
  leave = () => { left.gone = true; left.stop?.(); };
  try {
    await make(holder, query, { remember: (values) => { if (!left.gone) remember(view, values); }, left });
  } catch (error) {
    if (!left.gone) show(holder, nothing(`This view could not be loaded: ${error.message}`, " ", button("Try again", route)));
  }
}

function askForKey() {
  if (document.getElementById("key")) return;
  const input = h("input", { type: "password", id: "key", autocomplete: "off", value: apiKey() });
  const form = h("form", {
    class: "panel keyform", on: {
      submit: (event) => { event.preventDefault(); keepKey(input.value.trim()); form.remove(); say("Key kept for this tab."); route(); },
    },
  }, field("API key of this server", input, "It stays in this browser tab."), h("button", { class: "primary" }, "Use it"));
  main.before(form);
  input.focus();
}

window.addEventListener("hashchange", route);
window.addEventListener("tandem-key", askForKey);
window.addEventListener("unhandledrejection", (event) => { if (event.reason?.name !== "AbortError") say(String(event.reason?.message || event.reason)); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
route();
