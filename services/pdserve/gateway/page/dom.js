// Elements without markup: what a model or a worker says becomes text nodes, so none of it can be HTML.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Make an element. Properties that begin with "on" are listeners, with "--" custom CSS properties; `class`, `text` and
 * any attribute go by their names; null, undefined and false leave an attribute out, true sets it empty.
 */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for SVG. */
export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/** Set properties of an element that exists, as `h` does. */
export function set(element, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") setText(element, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value === null || value === undefined || value === false) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value === true ? "" : value)) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  return element;
}

/** Change an element's text only where it differs, so that selections and screen readers are left in peace. */
export function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

/**
 * Make `parent` hold one child per item, in order. A child is kept while its item's `key` stays: focus, transitions and
 * selections survive. `make(item)` returns a new child, `update(child, item)` brings it up to date.
 */
export function keyed(parent, items, key, make, update) {
  const before = parent.keyedChildren ?? new Map();
  const now = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    if (now.has(name)) continue;
    const child = before.get(name) ?? make(item);
    update(child, item);
    now.set(name, child);
    if (child === place) place = place.nextSibling;
    else parent.insertBefore(child, place);
  }
  for (const [name, child] of before) if (now.get(name) !== child) child.remove();
  parent.keyedChildren = now;
}

/** The element with this id; the page is ours, so it exists. */
export function byId(id) {
  return document.getElementById(id);
}

function fill(element, properties, children) {
  set(element, properties);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}
