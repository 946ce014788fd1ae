// Charts: small plots of a whole decode with a line at the clock's position. All share the clock's horizontal scale.

const WIDTH = 240, HEIGHT = 80;

class Charts {
  constructor(replay, ticks) {
    this.replay = replay;
    this.ticks = ticks;
    this.cursors = [];
    this.element = make("div", { class: "charts" }, this._shares(), this._changes(), this._certainty(), this._times());
  }

  show(tick) {
    const x = (tick / this.ticks) * WIDTH;
    for (const cursor of this.cursors) { cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); }
  }

  _x(step) { return ((step * this.replay.perStep) / this.ticks) * WIDTH; }

  _plot(title, description, keys, axes, ...shapes) {
    const cursor = draw("line", { class: "cursor", y1: 0, y2: HEIGHT, x1: 0, x2: 0 });
    this.cursors.push(cursor);
    const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": description }, ...shapes, cursor);
    const caption = make("figcaption", {}, make("b", { text: title }), ...keys.map(([kind, label]) => make("span", { class: `key ${kind}`, text: label })));
    const bottom = { unit: this.replay.units, ticks: passTicks(this.ticks, 4).map((tick) => [tick / this.ticks, tick]) };
    return make("figure", { class: "chart" }, caption, withAxes(svg, { ...axes, bottom }));
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
      shapes.push(draw("polygon", { class: `fill role-${ROLES[role].name}`, points: [...top, ...bottom].join(" ") }));
    }
    const left = { unit: "% of positions", ticks: [[0, 100], [0.5, 50], [1, 0]] };
    return this._plot("canvas filled", "share of each role after each forward pass", [], { left }, ...shapes);
  }

  // Commits upwards, revocations and edits downwards.
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
      if (drafted) shapes.push(draw("rect", { class: "fill role-draft", x, width, y: zero - drafted * unit, height: drafted * unit }));
      if (revoked) shapes.push(draw("rect", { class: "fill role-revoked", x, width, y: zero, height: revoked * unit }));
      if (edited) shapes.push(draw("rect", { class: "fill role-edited", x, width, y: zero + revoked * unit, height: edited * unit }));
    }
    shapes.push(draw("line", { class: "zero", x1: 0, x2: WIDTH, y1: zero, y2: zero }));
    const keys = [["role-draft", "committed"]], last = replay.totals[replay.count];
    if (last.revoked) keys.push(["role-revoked", "revoked"]);
    if (last.edited) keys.push(["role-edited", "edited"]);
    const levels = down ? [[1 / HEIGHT, up], [zero / HEIGHT, 0], [1 - 1 / HEIGHT, `−${down}`]] : [[1 / HEIGHT, up], [zero / HEIGHT, 0]];
    const room = levels.filter(([share], i) => i !== 1 || levels.every(([other], j) => j === 1 || Math.abs(share - other) > 0.15));
    return this._plot("each pass", "tokens committed, revoked and edited in each forward pass", keys, { left: { unit: "tokens", ticks: room } }, ...shapes);
  }

  // Mean confidence and entropy of what each step read.
  _certainty() {
    const { replay } = this, confidence = [], entropy = [], mean = (v) => v.reduce((a, b) => a + b, 0) / v.length;
    const means = replay.steps.map((s) => (s.at ? mean(s.entropy) : 0)), levels = roundTicks(Math.max(1e-3, ...means) * 1.5, 3);
    const most = levels[levels.length - 1];
    replay.steps.forEach((events, i) => {
      if (!events.at) return;
      confidence.push(this._point(i + 0.5, mean(events.confidence)));
      entropy.push(this._point(i + 0.5, means[i] / most));
    });
    const left = { unit: "confidence", ticks: [[0, 1], [0.5, 0.5], [1, 0]] };
    const right = { unit: "nats", ticks: levels.map((level) => [1 - level / most, level]) };
    return this._plot(
      "certainty", "mean confidence and entropy of the positions that each forward pass read",
      [["line-confidence", "mean confidence"], ["line-entropy", "mean entropy"]], { left, right },
      draw("polyline", { class: "curve line-confidence", points: confidence.join(" ") }),
      draw("polyline", { class: "curve line-entropy", points: entropy.join(" ") }),
    );
  }

  // Time of a step by part.
  _times() {
    const parts = this.replay.meanTimes(), total = parts.reduce((sum, part) => sum + part.ms, 0) || 1e-9;
    const kind = (name) => (/^[a-z]+$/.test(name) ? `part-${name}` : "");
    const bar = make("div", { class: "times", role: "img", "aria-label": parts.map((p) => `${p.name} ${number(p.ms)} ms`).join(", ") });
    for (const part of parts) {
      const piece = make("i", { class: kind(part.name), title: `${part.name}: ${number(part.ms)} ms (${percent(part.ms / total)})` });
      piece.style.flexGrow = String(part.ms / total);
      bar.append(piece);
    }
    const keys = parts.map((part) => make("span", { class: `key ${kind(part.name)}`, text: `${part.name} ${percent(part.ms / total)}` }));
    const caption = make("figcaption", {}, make("b", { text: "time of a step" }), make("span", { text: `mean ${number(total, 1)} ms` }));
    const bottom = { unit: "milliseconds", ticks: roundTicks(total, 4).map((ms) => [ms / total, ms]) };
    return make("figure", { class: "chart" }, caption, withAxes(bar, { bottom }), make("div", { class: "part-keys" }, ...keys));
  }

  _point(step, share) { return `${number(this._x(step))},${number((1 - share) * (HEIGHT - 2) + 1)}`; }
}
