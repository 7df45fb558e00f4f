// Elements from code. Text only ever becomes a text node: nothing here reads HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element: attributes, `on` handlers ({click: f}), properties (checked, value), children. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    } else if (name === "value" || name === "checked" || name === "selected" || name === "disabled") {
      element[name] = value;
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  add(element, children);
  return element;
}

/** Append elements and texts; lists are flattened, empty ones left out. */
export function add(element, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false || child === "") continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** Replace what an element holds. */
export function show(element, ...children) {
  element.replaceChildren();
  return add(element, ...children);
}

let numbered = 0;

/** An id that no other element has. */
export function newId(prefix = "x") {
  numbered += 1;
  return `${prefix}-${numbered}`;
}

/** A labelled control: {label, control}; the control gets the label's id. */
export function field(label, control, hint = "") {
  control.id ||= newId("field");
  const children = [h("label", { for: control.id }, label), control];
  if (hint) {
    const id = newId("hint");
    control.setAttribute("aria-describedby", id);
    children.push(h("span", { class: "hint", id }, hint));
  }
  return h("div", { class: "field" }, children);
}

/** A list to choose from: options are texts or [value, label]. */
export function choose(options, value, onchange, attributes = {}) {
  const list = h("select", { ...attributes, on: { change: () => onchange(list.value) } });
  for (const option of options) {
    const [key, label] = Array.isArray(option) ? option : [option, option];
    list.append(h("option", { value: key, selected: String(key) === String(value) }, label));
  }
  return list;
}

/** A button. */
export function button(label, onclick, attributes = {}) {
  return h("button", { type: "button", ...attributes, on: { click: onclick } }, label);
}

/** Say a line to everyone, screen readers included. */
export function say(text) {
  const status = document.getElementById("status");
  status.textContent = "";
  window.setTimeout(() => { status.textContent = text; }, 30);
  window.clearTimeout(say.timer);
  say.timer = window.setTimeout(() => { status.textContent = ""; }, 8000);
}

/** A button that copies a text. */
export function copyButton(text, label = "Copy") {
  const made = button(label, async () => {
    try {
      await navigator.clipboard.writeText(text);
      say("Copied.");
    } catch {
      say("The browser refused to copy; select the text instead.");
    }
  }, { class: "quiet" });
  return made;
}

/** A note in a panel, where there is nothing to show. */
export function nothing(...children) {
  return h("div", { class: "panel empty" }, h("p", {}, ...children));
}
