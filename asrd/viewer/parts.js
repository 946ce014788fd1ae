// Small things that every part of the page uses: elements, numbers, colours. Text always goes in as text.

function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  const { text, on, data, ...rest } = options;
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(rest)) if (value !== null && value !== undefined) element.setAttribute(name, value);
  for (const [name, value] of Object.entries(data || {})) element.dataset[name] = value;
  for (const [name, handler] of Object.entries(on || {})) element.addEventListener(name, handler);
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const number = (value, digits = 2) => value.toFixed(digits);
const percent = (value) => `${(100 * value).toFixed(value > 0.9995 || value < 0.0005 ? 0 : 1)} %`;

// A token as one word on a line: blanks are dropped, line ends shown.
function word(text) {
  const shown = text.replace(/\n/g, "⏎").trim();
  return shown === "" ? "␣" : shown;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
