// Panel: one decoder's decode: its name, counters, text, heat map and charts, at a step of its own.

class Panel {
  constructor(trace, replay, ticks, index, handlers) {
    this.replay = replay;
    this.grade = trace.grade;
    this.handlers = handlers;
    this.tick = 0;
    this.step = -1;
    this.chosen = null;
    const name = this.replay.header.decoder;
    this.name = name;
    this.badge = make("span", { class: "badge", hidden: "" });
    this.counters = {};
    this.text = new Text(replay, name, index, {
      hover: (place, box) => handlers.hover(this, place, box),
      leave: () => handlers.leave(),
      pick: (place) => handlers.pick(this, place, null),
    });
    this.heatmap = new Heatmap(this.replay, ticks, {
      hover: (cell, event) => this._hoverCell(cell, event),
      leave: () => handlers.leave(),
      pick: (cell) => cell && handlers.pick(this, cell.place, cell.step * this.replay.perStep),
    });
    this.charts = new Charts(this.replay, ticks);
    const title = make("div", { class: "panel-title" }, make("h2", { text: name }), make("span", { class: "settings", text: settingsOf(this.replay.header) }), this.badge);
    this.element = make("article", { class: "panel", "aria-label": `decoder ${name}` }, title, this._counters(), this.text.element, this.heatmap.element, this.charts.element);
  }

  _counters() {
    const checks = this.replay.witnesses ? { contradicted: "contradicted", edited: "edited" } : { anchors: "anchors", revoked: "revoked" };
    const { unit, units } = this.replay;
    const names = { passes: units, rate: `tokens / ${unit}`, pending: "pending", ...checks };
    const list = make("dl", { class: "counters" });
    for (const [key, label] of Object.entries(names)) {
      this.counters[key] = make("dd", { text: "0" });
      list.append(make("div", { class: `counter-${key}` }, make("dt", { text: label }), this.counters[key]));
    }
    return list;
  }

  _hoverCell(cell, event) {
    if (!cell || event.pointerType !== "mouse") { this.handlers.leave(); return; }
    const box = { left: event.clientX, width: 0, top: event.clientY - 6, bottom: event.clientY + 10 };
    this.handlers.hover(this, cell.place, box, cell.step);
  }

  choose(place) {
    this.chosen = place;
    this.text.choose(place);
    this.heatmap.show(this.tick, place);
  }

  // Draw anew what depends on the size of the window or on the theme.
  paint() {
    this.heatmap.paint();
    this.heatmap.show(this.tick, this.chosen);
    this.text.follow();
  }

  show(tick) {
    this.tick = tick;
    this.heatmap.show(tick, this.chosen);
    this.charts.show(tick);
    const step = this.replay.at(tick);
    if (step === this.step) return;
    this.step = step;
    this.text.show(step);
    this._count();
  }

  _count() {
    const { replay, step } = this, total = replay.totals[step], decided = replay.length - total.roles[MASK] - total.roles[REVOKED] - total.pending;
    const done = step === replay.count, text = done ? Math.min(replay.end, replay.length) : decided;
    this.counters.passes.textContent = `${step * replay.perStep}`;
    this.counters.passes.dataset.of = `/ ${replay.count * replay.perStep}`;
    this.counters.rate.textContent = step ? number(text / (step * replay.perStep), 1) : "–";
    for (const name of ["pending", "anchors", "revoked", "contradicted", "edited"]) {
      if (this.counters[name]) this.counters[name].textContent = total[name];
    }
    this.element.classList.toggle("done", done);
    this.badge.hidden = !done;
    this.badge.textContent = replay.error || this.grade || "done";
    this.badge.dataset.good = String(!replay.error && !String(this.grade).startsWith("wrong"));
  }
}

// The settings shown beside a decoder's name; those that are not set are left out.
function settingsOf(header) {
  const names = ["threshold", "window", "alpha", "beta", "factor", "threshold_back", "ratio", "saber_n", "steps", "alg", "kv_cache", "cfg_scale", "temperature"];
  const shown = names.filter((name) => header.settings[name] !== undefined && header.settings[name] !== null && header.settings[name] !== 0);
  return shown.map((name) => `${name} ${header.settings[name]}`).join(" · ");
}
