// Small helpers for elements, canvases and numbers. Text is always text, never markup.

export const byId = (id) => document.getElementById(id);

/** An element with properties (`class`, `on...`, attributes) and children. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Fit the bitmap of a canvas to its place; returns its context in CSS pixels. */
export function fitCanvas(canvas, options = {}) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(1, Math.round(canvas.clientWidth * ratio));
  const height = Math.max(1, Math.round(canvas.clientHeight * ratio));
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const context = canvas.getContext("2d", options);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

const due = new Map();

/** Call `draw` before the next frame of the screen, once for each `owner`. A page that
 * nobody sees draws nothing. */
export function beforeFrame(owner, draw) {
  if (!due.size) {
    requestAnimationFrame(() => {
      const draws = [...due.values()];
      due.clear();
      for (const one of draws) one();
    });
  }
  due.set(owner, draw);
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return whole.format(value);
}

/** A number in few characters: 1,234, 56.7k, 1.2M. */
export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size >= 100 || Number.isInteger(value)) return whole.format(value);
  return value.toFixed(size >= 10 ? 1 : 2);
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
