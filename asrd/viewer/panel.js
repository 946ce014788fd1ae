// Panel: one decoder's decode: its name, counters, text, heat map and charts, at a step of its own.

const MASK_SIGN = "··";

class Panel {
  constructor(trace, replay, ticks, index, handlers) {
    this.replay = replay;
    this.grade = trace.grade;
    this.handlers = handlers;
    this.step = -1;
    this.chosen = null;
    const name = this.replay.header.decoder;
    this.name = name;
    this.badge = make("span", { class: "badge", hidden: "" });
    this.counters = {};
    this.text = make("div", { class: "text", role: "listbox", tabindex: "0", id: `text-${index}`, "aria-label": `text of ${name}; arrow keys go from token to token` });
    this.heatmap = new Heatmap(this.replay, ticks, {
      hover: (cell, event) => this._hoverCell(cell, event),
      leave: () => handlers.leave(),
      pick: (cell) => cell && handlers.pick(this, cell.place, cell.step * this.replay.perStep),
    });
    this.charts = new Charts(this.replay, ticks);
    const title = make("div", { class: "panel-title" }, make("h2", { text: name }), make("span", { class: "settings", text: settingsOf(this.replay.header) }), this.badge);
    this.element = make("article", { class: "panel", "aria-label": `decoder ${name}` }, title, this._counters(), this.text, this.heatmap.element, this.charts.element);
    const own = /^[a-z-]+$/.test(name) ? `var(--decoder-${name}, var(--decoder-other))` : "var(--decoder-other)";
    this.element.style.setProperty("--own", own);
    this._cells(index);
    this._listen();
  }

  _counters() {
    const checks = this.replay.witnesses ? { contradicted: "contradicted", edited: "edited" } : { anchors: "anchors", revoked: "revoked" };
    const names = { passes: "forward passes", rate: "tokens / pass", pending: "pending", ...checks };
    const list = make("dl", { class: "counters" });
    for (const [key, label] of Object.entries(names)) {
      this.counters[key] = make("dd", { text: "0" });
      list.append(make("div", { class: `counter-${key}` }, make("dt", { text: label }), this.counters[key]));
    }
    return list;
  }

  _cells(index) {
    this.cells = [];
    const all = document.createDocumentFragment();
    for (let place = 0; place < this.replay.length; place++) {
      const gap = document.createTextNode(" ");
      const token = make("span", { class: "tok", role: "option", id: `tok-${index}-${place}`, "aria-selected": "false", data: { place } });
      token.dataset.ghost = this._ghost(place);
      this.cells.push({ gap, token, role: -1, id: -1 });
      all.append(gap, token);
    }
    this.text.append(all);
  }

  // A mask is as wide as the final token at its position, so that the text does not move.
  _ghost(place) {
    const { replay } = this;
    return place >= replay.end || !replay.count ? MASK_SIGN : replay.text(replay.tokens[replay.count * replay.length + place]).trim() || MASK_SIGN;
  }

  _listen() {
    const place = (event) => (event.target.dataset.place === undefined ? null : Number(event.target.dataset.place));
    this.text.addEventListener("pointerover", (event) => {
      if (event.pointerType === "mouse" && place(event) !== null) this.handlers.hover(this, place(event), event.target.getBoundingClientRect());
    });
    this.text.addEventListener("pointerout", () => this.handlers.leave());
    this.text.addEventListener("click", (event) => place(event) !== null && this.handlers.pick(this, place(event), null));
    this.text.addEventListener("keydown", (event) => this._key(event));
    this.text.addEventListener("scroll", () => this._fade(), { passive: true });
    this.text.addEventListener("blur", () => this._activate(null));
  }

  _key(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1 };
    if (event.key in moves) {
      const from = this.active === null || this.active === undefined ? (moves[event.key] > 0 ? -1 : this.replay.length) : this.active;
      this._activate(Math.min(Math.max(from + moves[event.key], 0), this.replay.length - 1));
    } else if (event.key === "Enter" && this.active !== null && this.active !== undefined) {
      this.handlers.pick(this, this.active, null);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // Mark the token that the keyboard has reached; its label is made on demand.
  _activate(place) {
    if (this.active !== null && this.active !== undefined) this.cells[this.active].token.classList.remove("active");
    this.active = place;
    if (place === null) { this.text.removeAttribute("aria-activedescendant"); return; }
    const { token } = this.cells[place], role = ROLES[this.replay.role(this.step, place)], reading = this.replay.reading(this.step, place);
    const certain = reading ? `, predicted ${word(this.replay.text(reading.token))} with confidence ${number(reading.confidence)}` : "";
    token.setAttribute("aria-label", `position ${place}: ${token.textContent.trim() || "mask"}, ${role.label}${certain}`);
    token.classList.add("active");
    token.scrollIntoView({ block: "nearest" });
    this.text.setAttribute("aria-activedescendant", token.id);
  }

  _hoverCell(cell, event) {
    if (!cell || event.pointerType !== "mouse") { this.handlers.leave(); return; }
    const box = { left: event.clientX, width: 0, top: event.clientY - 6, bottom: event.clientY + 10 };
    this.handlers.hover(this, cell.place, box, cell.step);
  }

  choose(place) {
    if (this.chosen !== null) { this.cells[this.chosen].token.classList.remove("chosen"); this.cells[this.chosen].token.setAttribute("aria-selected", "false"); }
    this.chosen = place;
    if (place !== null) { this.cells[place].token.classList.add("chosen"); this.cells[place].token.setAttribute("aria-selected", "true"); }
    this.heatmap.show(this.step, this.chosen);
  }

  paint() { this.heatmap.paint(); this.heatmap.show(Math.max(this.step, 0), this.chosen); this._fade(); }

  // Scroll a long text to the first position that is not final, and show where it goes on.
  _follow() {
    const { text, replay, step } = this;
    if (text.scrollHeight > text.clientHeight) {
      let place = 0;
      while (place < replay.length - 1 && replay.role(step, place) === FINAL) place++;
      const token = this.cells[place].token, above = token.offsetTop - text.offsetTop;
      const hidden = above < text.scrollTop || above + token.offsetHeight > text.scrollTop + text.clientHeight;
      if (hidden || step === 0) text.scrollTop = Math.max(0, above - text.clientHeight / 3);
    }
    this._fade();
  }

  _fade() {
    const { text } = this, left = text.scrollHeight - text.clientHeight - text.scrollTop;
    text.classList.toggle("more-above", text.scrollTop > 4);
    text.classList.toggle("more-below", left > 4);
  }

  show(tick) {
    const step = this.replay.at(tick);
    if (step === this.step) return;
    this.step = step;
    for (let place = 0; place < this.cells.length; place++) this._cell(place);
    const { replay } = this, total = replay.totals[step], decided = replay.length - total.roles[MASK] - total.roles[REVOKED] - total.pending;
    const text = step === replay.count ? Math.min(replay.end, replay.length) : decided;
    const done = step === replay.count;
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
    this.heatmap.show(step, this.chosen);
    this.charts.show(step);
    this._follow();
  }

  // Update one token's element if it has changed.
  _cell(place) {
    const { replay, step } = this, cell = this.cells[place], role = replay.role(step, place), id = replay.token(step, place);
    const padded = replay.padded(step, place), kind = padded ? 9 : role;
    if (cell.role === kind && (cell.id === id || role === MASK)) return;
    cell.role = kind;
    cell.id = id;
    const text = replay.text(id), lines = (text.match(/\n/g) || []).length;
    cell.gap.data = place === 0 ? "" : role === MASK || padded ? " " : lines ? "\n".repeat(Math.min(lines, 2)) : /^\s/.test(text) ? " " : "";
    cell.token.textContent = padded || role === MASK ? "" : text.trim() || "␣";
    cell.token.dataset.role = padded ? "padding" : ROLES[role].name;
    if (role === EDITED) cell.token.dataset.before = word(replay.text(replay.before(step, place)));
    else delete cell.token.dataset.before;
  }
}

// The settings shown beside a decoder's name; those that are not set are left out.
function settingsOf(header) {
  const names = ["threshold", "window", "alpha", "beta", "factor", "threshold_back", "ratio", "saber_n", "steps", "alg", "kv_cache", "cfg_scale", "temperature"];
  const shown = names.filter((name) => header.settings[name] !== undefined && header.settings[name] !== null && header.settings[name] !== 0);
  return shown.map((name) => `${name} ${header.settings[name]}`).join(" · ");
}
