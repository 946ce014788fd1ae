// The page: one clock of forward passes for all panels, the keyboard, the theme, and the pinned history.

class Viewer {
  constructor(data) {
    this.traces = data.traces;
    this.find = (id) => document.getElementById(id);
    this.tick = 0;
    this.playing = false;
    this.picked = null; // { panel, place }
    this.history = new History((tick) => this.seek(tick), () => this.pick(null));
    this._legend();
    this._speeds();
    this._rows();
    this._build(0);
    this._listen();
    this._open();
  }

  // Begin, paused, at the first pass that revokes or edits a token, or at the first of all, and invite to play.
  _open() {
    const changes = this.panels.flatMap(({ replay }) => {
      const change = replay.firstChange();
      return change ? [{ tick: change.step * replay.perStep, name: change.name }] : [];
    }).sort((one, other) => one.tick - other.tick);
    const { tick, name } = changes[0] || { tick: this.stride, name: null };
    this.seek(tick);
    this._invite(name ? `pass ${this.tick}: the first ${name}` : `pass ${this.tick} of ${this.ticks}`);
  }

  // Until the clock is moved, the play button says that it plays from the start, and what is shown; null: no longer.
  _invite(shown) {
    this.inviting = shown !== null;
    this.find("controls").classList.toggle("inviting", this.inviting);
    this.find("invitation").hidden = !this.inviting;
    if (!this.inviting) return;
    this.find("shown").textContent = shown;
    this.find("status").textContent += `. ${shown}; play starts at the beginning`;
  }

  _build(row) {
    const replays = this.traces.map((trace) => new Replay(trace.records, row));
    this.ticks = Math.max(1, ...replays.map((replay) => replay.count * replay.perStep));
    this.stride = Math.min(...this.traces.map((t) => t.records[0].forwards_per_step));
    const handlers = {
      hover: (panel, place, box, step) => this.history.hover(panel.replay, step === undefined ? panel.step : step, place, box),
      leave: () => this.history.leave(),
      pick: (panel, place, tick) => { if (tick !== null) this.seek(tick); this.pick({ panel, place }); },
    };
    this.panels = this.traces.map((trace, i) => new Panel(trace, replays[i], this.ticks, i, handlers));
    this.find("panels").replaceChildren(...this.panels.map((panel) => panel.element));
    this.find("panels").dataset.count = this.panels.length;
    const { header } = this.panels[0].replay;
    this.find("model").textContent = `${header.model} · ${this.panels.map((p) => p.name).join(" beside ")}`;
    this.find("prompt").textContent = this.panels[0].replay.prompt();
    const slider = this.find("slider");
    slider.max = this.ticks;
    slider.step = this.stride;
    for (const panel of this.panels) panel.paint();
  }

  _rows() {
    const { prompt } = this.traces[0].records[0], select = this.find("row");
    if (prompt.length < 2) return;
    this.find("row-choice").hidden = false;
    prompt.forEach((_, row) => select.append(make("option", { value: row, text: String(row) })));
    select.addEventListener("change", () => { this.pick(null); this._build(Number(select.value)); this._open(); });
  }

  _legend() {
    const edits = this.traces.some((trace) => trace.records.some((record) => (record.rows || []).some((row) => row.edit || row.replace)));
    const shown = ROLES.filter((role) => edits || role.name !== "edited").map((role) => make("li", {},
      make("i", { class: `swatch role-${role.name}` }),
      make("span", { class: "tok", data: { role: role.name }, text: role.label, "data-ghost": "" }),
      make("small", { text: role.name === "pending" && !edits ? "may still be revoked" : role.meaning })));
    this.find("legend").append(...shown);
  }

  _speeds() {
    const select = this.find("speed"), longest = Math.max(...this.traces.map((t) => t.records.length));
    const speeds = [1, 2, 4, 8, 16, 32, 64, 128], usual = speeds.find((speed) => speed >= longest / 12) || 128;
    for (const speed of speeds) select.append(make("option", { value: speed, text: `${speed}/s` }));
    select.value = Math.max(usual, 4);
  }

  _listen() {
    const click = (id, action) => this.find(id).addEventListener("click", action);
    click("play", () => this.play(!this.playing));
    click("first", () => this.seek(0));
    click("back", () => this.move(-1));
    click("on", () => this.move(1));
    click("last", () => this.seek(this.ticks));
    click("theme", () => this.toggleTheme());
    click("help", () => this.toggleHelp());
    this.find("slider").addEventListener("input", (event) => { this.play(false); this.seek(Number(event.target.value)); });
    document.addEventListener("keydown", (event) => this._key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
    let waiting = 0;
    window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => this.paint()); });
    window.addEventListener("scroll", () => this.history.leave(), { passive: true });
  }

  _key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inside = event.target.tagName, typing = inside === "SELECT";
    const actions = {
      " ": () => this.play(!this.playing), ArrowRight: () => this.move(1), ArrowLeft: () => this.move(-1),
      Home: () => this.seek(0), End: () => this.seek(this.ticks), Escape: () => this.pick(null),
      "+": () => this.faster(1), "=": () => this.faster(1), "-": () => this.faster(-1), t: () => this.toggleTheme(), "?": () => this.toggleHelp(),
    };
    const action = actions[event.key];
    if (!action || typing || (event.key === " " && (inside === "BUTTON" || inside === "SUMMARY"))) return;
    event.preventDefault();
    action();
  }

  move(direction) { this.play(false); this.seek(this.tick + direction * this.stride); }

  seek(tick) {
    if (this.inviting) this._invite(null);
    this.tick = Math.min(Math.max(tick, 0), this.ticks);
    for (const panel of this.panels) panel.show(this.tick);
    this.find("slider").value = this.tick;
    this.find("slider").setAttribute("aria-valuetext", `forward pass ${this.tick} of ${this.ticks}`);
    this.find("clock").textContent = `${this.tick} / ${this.ticks}`;
    if (this.picked) this._showPicked();
    if (!this.playing) this._say();
  }

  play(on) {
    if (on && (this.inviting || this.tick >= this.ticks)) this.seek(0);
    this.playing = on;
    const button = this.find("play");
    button.setAttribute("aria-label", on ? "pause" : "play");
    button.classList.toggle("on", on);
    if (on) this._run();
  }

  _run() {
    let last = performance.now(), due = 0;
    const frame = (now) => {
      if (!this.playing) return;
      due += ((now - last) / 1000) * Number(this.find("speed").value);
      last = now;
      const passes = Math.floor(due / this.stride) * this.stride;
      if (passes) { due -= passes; this.seek(this.tick + passes); }
      if (this.tick >= this.ticks) { this.play(false); this._say(); return; }
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  faster(direction) {
    const select = this.find("speed");
    select.selectedIndex = Math.min(Math.max(select.selectedIndex + direction, 0), select.options.length - 1);
  }

  pick(what) {
    if (this.picked) this.picked.panel.choose(null);
    const root = document.documentElement, moves = root.classList.contains("with-history") !== (what !== null);
    this.picked = what;
    root.classList.toggle("with-history", what !== null);
    if (moves) this.paint();
    if (what === null) { this.history.unpin(); return; }
    what.panel.choose(what.place);
    this._showPicked();
    what.panel.text.reveal(what.place);
  }

  _showPicked() {
    const { panel, place } = this.picked;
    this.history.pin(panel.replay, panel.name, panel.step, place);
  }

  _say() {
    const told = this.panels.map((panel) => {
      const total = panel.replay.totals[panel.step];
      return `${panel.name}: ${total.roles[MASK] + total.roles[REVOKED]} masks, ${total.pending} pending, ${total.anchors} anchors, ${total.revoked} revoked, ${total.edited} edited`;
    });
    this.find("status").textContent = `forward pass ${this.tick} of ${this.ticks}. ${told.join(". ")}`;
  }

  toggleHelp() {
    const keys = this.find("keys");
    keys.hidden = !keys.hidden;
    this.find("help").setAttribute("aria-expanded", String(!keys.hidden));
  }

  toggleTheme() {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.dataset.theme || (dark ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    this.paint();
  }

  paint() { for (const panel of this.panels) panel.paint(); }
}

const viewer = new Viewer(JSON.parse(document.getElementById("data").textContent));
requestAnimationFrame(() => performance.mark("asrd-first-render"));
