// History of one position: the prediction and the events of every forward pass; in a tip while hovering, in full when pinned.

const EVENTS = {
  draft: "drafted", replace: "overwritten", contradict: "contradicted by its witness", edit: "edited", anchor: "became an anchor", pend: "pending",
  keep: "passed its check", revoke: "revoked", fill: "padding: the text has ended",
};
const ROWS_IN_TIP = 8;

function historyTitle(replay, step, place) {
  const role = ROLES[replay.role(step, place)], shown = word(replay.text(replay.token(step, place)));
  return make("header", {},
    make("b", { class: "tok", data: { role: role.name }, text: role.name === "mask" ? "mask" : shown }),
    make("span", { text: `position ${place} · ${role.label}${role.meaning ? `: ${role.meaning}` : ""}` }));
}

function historyRow(replay, line, now, seek) {
  const { reading, step } = line;
  const bar = make("i", { class: "bar" });
  if (reading) bar.style.width = `${100 * reading.confidence}%`;
  const change = `: ${word(replay.text(line.before))} → ${word(replay.text(line.token))}`;
  const said = (name) => EVENTS[name] + (name === "edit" || name === "replace" ? change : "");
  const events = line.events.map((name) => make("em", { class: `event event-${name}`, text: said(name) }));
  const moved = [];
  if (reading && reading.guidance) moved.push(`guided ${number(reading.guidance, 3)}`);
  if (reading && reading.witness) moved.push("predicted by its witness");
  if (reading && reading.probe) moved.push(`probed ${number(reading.probe)}`);
  const pass = seek ? make("button", { type: "button", class: "seek", text: String(step), "aria-label": `go to forward pass ${step}`, on: { click: () => seek(step) } }) : String(step);
  return make("tr", { class: step === now ? "now" : step > now ? "later" : null },
    make("td", {}, pass),
    make("td", { class: "prediction", text: reading ? word(replay.text(reading.token)) : "" }),
    make("td", { class: "confidence" }, make("span", {}, bar), make("small", { text: reading ? number(reading.confidence) : "" })),
    make("td", { text: reading ? number(reading.entropy) : "" }),
    make("td", { class: "events" }, ...events, ...(moved.length ? [make("small", { text: moved.join(" · ") })] : [])));
}

function historyTable(replay, lines, now, seek) {
  const head = ["pass", "prediction", "confidence", "entropy", "what happened"];
  return make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col", text })))),
    make("tbody", {}, ...lines.map((line) => historyRow(replay, line, now, seek))));
}

class History {
  constructor(seek, close) {
    this.element = document.getElementById("history");
    this.tip = document.getElementById("tip");
    this.seek = seek;
    this.close = close;
  }

  // Beside the pointer: the latest lines up to now.
  hover(replay, step, place, box) {
    const all = replay.history(place);
    let lines = all.filter((line) => line.step <= step);
    const left = Math.max(0, lines.length - ROWS_IN_TIP);
    lines = lines.slice(left);
    const notes = [];
    if (left) notes.push(`${left} earlier`);
    if (all.length > left + lines.length) notes.push(`${all.length - left - lines.length} later`);
    const content = lines.length ? historyTable(replay, lines, step, null) : make("p", { text: "no forward pass has read this position yet" });
    this.tip.replaceChildren(historyTitle(replay, step, place), content, make("footer", { text: [...notes, "click to pin"].join(" · ") }));
    this.tip.hidden = false;
    const tip = this.tip.getBoundingClientRect(), room = 8;
    const x = Math.min(Math.max(room, box.left + box.width / 2 - tip.width / 2), window.innerWidth - tip.width - room);
    const above = box.top - tip.height - room;
    this.tip.style.left = `${x}px`;
    const lowest = document.getElementById("controls").getBoundingClientRect().top - tip.height - room;
    this.tip.style.top = `${above > room ? above : Math.min(box.bottom + room, lowest)}px`;
  }

  leave() { this.tip.hidden = true; }

  pin(replay, name, step, place) {
    this.leave();
    const lines = replay.history(place), scroll = this.element.scrollTop;
    const close = make("button", { type: "button", class: "quiet close", text: "✕", "aria-label": "close the history", on: { click: this.close } });
    this.element.replaceChildren(
      make("div", { class: "bar-top" }, make("small", { text: name }), close),
      historyTitle(replay, step, place), this._curve(replay, lines, step),
      lines.length ? historyTable(replay, lines, step, (to) => this.seek(to * replay.perStep)) : make("p", { text: "no forward pass has read this position" }));
    this.element.hidden = false;
    this.element.scrollTop = scroll;
  }

  // Confidence over the steps, with a mark at each event.
  _curve(replay, lines, step) {
    const width = 300, height = 56, x = (s) => (s / Math.max(replay.count, 1)) * width, y = (c) => 2 + (1 - c) * (height - 4);
    const read = lines.filter((line) => line.reading);
    const svg = draw("svg", { class: "confidence-curve", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": "confidence at each forward pass" });
    svg.append(draw("polyline", { class: "curve line-confidence", points: read.map((l) => `${x(l.step)},${y(l.reading.confidence)}`).join(" ") }));
    for (const line of lines) {
      for (const name of line.events) svg.append(draw("rect", { class: `mark mark-${name}`, x: x(line.step) - 1.5, y: 0, width: 3, height }));
    }
    svg.append(draw("line", { class: "cursor", x1: x(step), x2: x(step), y1: 0, y2: height }));
    const passes = Math.max(replay.count * replay.perStep, 1);
    const bottom = { unit: replay.units, ticks: passTicks(passes, 6).map((tick) => [tick / passes, tick]) };
    return withAxes(svg, { left: { unit: "confidence", ticks: [[0, 1], [0.5, 0.5], [1, 0]] }, bottom });
  }

  unpin() { this.element.hidden = true; this.element.replaceChildren(); }
}
