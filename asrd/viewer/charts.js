// Charts: small plots of a whole decode with a line at the clock's position. All share the clock's horizontal scale.

const WIDTH = 240, HEIGHT = 64;

class Charts {
  constructor(replay, ticks) {
    this.replay = replay;
    this.ticks = ticks;
    this.cursors = [];
    this.element = make("div", { class: "charts" }, this._shares(), this._changes(), this._certainty(), this._times());
  }

  show(step) {
    const x = this._x(step);
    for (const cursor of this.cursors) { cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); }
  }

  _x(step) { return ((step * this.replay.perStep) / this.ticks) * WIDTH; }

  // A chart with its axes: numbers at the top and bottom of the vertical one, the clock's range below.
  _frame(title, description, keys, top, bottom, ...shapes) {
    const cursor = draw("line", { class: "cursor", y1: 0, y2: HEIGHT, x1: 0, x2: 0 });
    this.cursors.push(cursor);
    const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": description }, ...shapes, cursor);
    const caption = make("figcaption", {}, make("b", { text: title }), ...keys.map(([name, label]) => make("span", { class: `key key-${name}`, text: label })));
    const up = make("div", { class: "axis-up" }, make("span", { text: top }), make("span", { text: bottom }));
    const across = make("div", { class: "axis-across" }, make("span", { text: "0" }), make("span", { text: `${this.ticks} forward passes` }));
    return make("figure", { class: "chart" }, caption, make("div", { class: "plot" }, up, svg), across);
  }

  // Share of each role after each step.
  _shares() {
    const { replay } = this, order = [FINAL, DRAFT, ANCHOR, EDITED, PENDING, MASK], shapes = [];
    const low = new Array(replay.count + 1).fill(0);
    for (const role of order) {
      const top = [], bottom = [];
      for (let step = 0; step <= replay.count; step++) {
        const { roles } = replay.totals[step], amount = roles[role] + (role === MASK ? roles[REVOKED] : 0);
        bottom.unshift(this._point(step, low[step] / replay.length));
        low[step] += amount;
        top.push(this._point(step, low[step] / replay.length));
      }
      shapes.push(draw("polygon", { class: `fill-${ROLES[role].name}`, points: [...top, ...bottom].join(" ") }));
    }
    return this._frame("canvas filled", "share of each role after each forward pass", [], "100 %", "0", ...shapes);
  }

  // Commits upwards, revocations downwards.
  _changes() {
    const { replay } = this, shapes = [], steps = [];
    for (let step = 1; step <= replay.count; step++) {
      const now = replay.totals[step], then = replay.totals[step - 1];
      steps.push({ step, drafted: now.drafted - then.drafted, revoked: now.revoked - then.revoked, edited: now.edited - then.edited });
    }
    const up = Math.max(1, ...steps.map((s) => s.drafted)), down = Math.max(0, ...steps.map((s) => s.revoked + s.edited));
    const unit = (HEIGHT - 2) / (up + down), zero = up * unit + 1;
    for (const { step, drafted, revoked, edited } of steps) {
      const x = this._x(step - 1), width = Math.max(this._x(1) - 0.6, 0.6);
      if (drafted) shapes.push(draw("rect", { class: "fill-draft", x, width, y: zero - drafted * unit, height: drafted * unit }));
      if (revoked) shapes.push(draw("rect", { class: "fill-revoked", x, width, y: zero, height: revoked * unit }));
      if (edited) shapes.push(draw("rect", { class: "fill-edited", x, width, y: zero + revoked * unit, height: edited * unit }));
    }
    shapes.push(draw("line", { class: "axis", x1: 0, x2: WIDTH, y1: zero, y2: zero }));
    const keys = [["draft", "committed"]];
    if (down) keys.push(replay.witnesses ? ["edited", "edited"] : ["revoked", "revoked"]);
    return this._frame("tokens per pass", "tokens committed, revoked and edited in each forward pass", keys, String(up), down ? `−${down}` : "0", ...shapes);
  }

  // Mean confidence and entropy of what each step read.
  _certainty() {
    const { replay } = this, confidence = [], entropy = [], mean = (v) => v.reduce((a, b) => a + b, 0) / v.length;
    const most = Math.max(1e-9, ...replay.steps.map((s) => (s.at ? mean(s.entropy) : 0)));
    replay.steps.forEach((events, i) => {
      if (!events.at) return;
      confidence.push(this._point(i + 0.5, mean(events.confidence)));
      entropy.push(this._point(i + 0.5, mean(events.entropy) / most));
    });
    return this._frame(
      "mean of positions read", "mean confidence and entropy of the positions that each forward pass read",
      [["confidence", "confidence, 0 to 1"], ["entropy", `entropy, 0 to ${number(most, 1)} nats`]], "1", "0",
      draw("polyline", { class: "curve curve-confidence", points: confidence.join(" ") }),
      draw("polyline", { class: "curve curve-entropy", points: entropy.join(" ") }),
    );
  }

  // Time of a step by part.
  _times() {
    const parts = this.replay.meanTimes(), total = parts.reduce((sum, part) => sum + part.ms, 0);
    const bar = make("div", { class: "times", role: "img", "aria-label": parts.map((p) => `${p.name} ${number(p.ms)} ms`).join(", ") });
    const label = (name) => (name === "head" ? "LM head" : name);
    for (const part of parts) {
      const piece = make("i", { data: { part: part.name }, title: `${label(part.name)}: ${number(part.ms)} ms (${percent(part.ms / total)})` });
      piece.style.flexGrow = String(part.ms / total);
      bar.append(piece);
    }
    const keys = parts.map((part) => make("span", { class: "key", data: { part: part.name }, text: `${label(part.name)} ${percent(part.ms / total)}` }));
    const caption = make("figcaption", {}, make("b", { text: "time" }), make("span", { text: `${number(total, 1)} ms per step` }));
    return make("figure", { class: "chart" }, caption, bar, make("div", { class: "time-keys" }, ...keys));
  }

  _point(step, share) { return `${number(this._x(step))},${number((1 - share) * (HEIGHT - 2) + 1)}`; }
}
