// Text: the tokens of a decode at a step, in a box of whole lines that follows the active block; from token to token with
// the arrow keys.

const MASK_SIGN = "··";
const PADDED = -2; // in the place of a role

class Text {
  // handlers: hover(place, box), leave(), pick(place)
  constructor(replay, name, index, handlers) {
    this.replay = replay;
    this.handlers = handlers;
    this.step = 0;
    this.chosen = null;
    this.active = null;
    this.list = make("div", { class: "text", role: "listbox", tabindex: "0", id: `text-${index}`, "aria-label": `text of ${name}; arrow keys go from token to token` });
    this.element = make("div", { class: "text-box" }, this.list);
    this.cells = Array.from({ length: replay.length }, (_, place) => ({
      gap: document.createTextNode(""), role: -1, id: -1,
      token: make("span", { class: "tok", role: "option", id: `tok-${index}-${place}`, "aria-selected": "false", data: { place, ghost: this._ghost(place) } }),
    }));
    this.list.append(...this.cells.flatMap((cell) => [cell.gap, cell.token]));
    this._listen();
  }

  show(step) {
    this.step = step;
    for (let place = 0; place < this.cells.length; place++) this._cell(place);
    this.follow();
  }

  choose(place) {
    const mark = (at, on) => { this.cells[at].token.classList.toggle("chosen", on); this.cells[at].token.setAttribute("aria-selected", String(on)); };
    if (this.chosen !== null) mark(this.chosen, false);
    this.chosen = place;
    if (place !== null) mark(place, true);
  }

  // Scroll the box, and the page if need be, to a token.
  reveal(place) {
    this._scroll([place]);
    this.cells[place].token.scrollIntoView({ block: "nearest" });
  }

  // Scroll to what the step is about, with the next frame: the layout is up to date there.
  follow() {
    cancelAnimationFrame(this.waiting);
    this.waiting = requestAnimationFrame(() => { this._scroll(...this._subjects()); });
  }

  // What a step is about: what it revokes or edits, or else what it commits; better with its whole block.
  _subjects() {
    const { replay, step } = this;
    if (!step) return [[0]];
    const events = replay.steps[step - 1], size = replay.header.block_length, first = Math.min(events.block * size, replay.length - 1);
    const changed = [...(events.revoke || []), ...(events.edit || [[]])[0], ...(events.replace || [[]])[0]];
    const committed = events.draft ? events.draft[0] : [first], subject = changed.length ? changed : committed;
    return [[...subject, first, Math.min(first + size, replay.length) - 1], subject];
  }

  // Show the first of the groups of places that fits into the box, or the beginning of the last one, with a line above and
  // below if there is room: the outermost lines may be faded. Stay if it is in sight.
  _scroll(...groups) {
    const { list } = this, height = parseFloat(getComputedStyle(list).lineHeight);
    const shown = Math.max(1, Math.round(list.clientHeight / height)), total = Math.round(list.scrollHeight / height);
    const base = this.cells[0].token.offsetTop, row = (place) => Math.round((this.cells[place].token.offsetTop - base) / height);
    let first = 0, last = 0;
    for (const group of groups) {
      const rows = group.map(row);
      first = Math.min(...rows);
      last = Math.max(...rows);
      if (last - first + 1 < shown || total <= shown) break;
      last = first;
    }
    const room = last - first + 3 <= shown ? 1 : 0, above = Math.max(0, first - room), below = Math.min(total - 1, last + room);
    const top = Math.round(list.scrollTop / height);
    if (above < top || below >= top + shown) list.scrollTop = above * height;
    this._fade();
  }

  // Tell the style where there is more text than is shown.
  _fade() {
    const { scrollTop, clientHeight, scrollHeight } = this.list;
    this.element.classList.toggle("more-above", scrollTop > 1);
    this.element.classList.toggle("more-below", scrollTop + clientHeight < scrollHeight - 1);
  }

  // A mask is as wide as the final token at its position, so that the text does not move.
  _ghost(place) { return this._last(place).trim() || MASK_SIGN; }

  _last(place) {
    const { replay } = this;
    return place >= replay.end || !replay.count ? ` ${MASK_SIGN}` : replay.text(replay.tokens[replay.count * replay.length + place]);
  }

  // Update one token's element if it has changed.
  _cell(place) {
    const { replay, step } = this, cell = this.cells[place], role = replay.role(step, place), id = replay.token(step, place);
    const padded = replay.padded(step, place), kind = padded ? PADDED : role;
    if (cell.role === kind && (cell.id === id || role === MASK)) return;
    cell.role = kind;
    cell.id = id;
    const text = replay.text(id), spaced = role === MASK ? this._last(place) : padded ? " " : text, lines = (spaced.match(/\n/g) || []).length;
    cell.gap.data = !place ? "" : lines ? "\n".repeat(Math.min(lines, 2)) : /^\s/.test(spaced) ? " " : "";
    cell.token.classList.toggle("joined", Boolean(place) && cell.gap.data === "");
    cell.token.textContent = padded || role === MASK ? "" : text.trim() || "␣";
    cell.token.dataset.role = padded ? "padding" : ROLES[role].name;
    if (role === EDITED) cell.token.dataset.before = word(replay.text(replay.before(step, place)));
    else delete cell.token.dataset.before;
  }

  _listen() {
    const place = (event) => (event.target.dataset.place === undefined ? null : Number(event.target.dataset.place));
    this.list.addEventListener("pointerover", (event) => {
      if (event.pointerType === "mouse" && place(event) !== null) this.handlers.hover(place(event), event.target.getBoundingClientRect());
    });
    this.list.addEventListener("pointerout", () => this.handlers.leave());
    this.list.addEventListener("click", (event) => place(event) !== null && this.handlers.pick(place(event)));
    this.list.addEventListener("scroll", () => { this.handlers.leave(); this._fade(); }, { passive: true });
    this.list.addEventListener("keydown", (event) => this._key(event));
    this.list.addEventListener("blur", () => this._activate(null));
  }

  _key(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1 };
    if (event.key in moves) {
      const from = this.active === null ? (moves[event.key] > 0 ? -1 : this.replay.length) : this.active;
      this._activate(Math.min(Math.max(from + moves[event.key], 0), this.replay.length - 1));
    } else if (event.key === "Enter" && this.active !== null) {
      this.handlers.pick(this.active);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // Mark the token that the keyboard has reached; its label is made on demand.
  _activate(place) {
    if (this.active !== null) this.cells[this.active].token.classList.remove("active");
    this.active = place;
    if (place === null) { this.list.removeAttribute("aria-activedescendant"); return; }
    const { token } = this.cells[place], role = ROLES[this.replay.role(this.step, place)], reading = this.replay.reading(this.step, place);
    const certain = reading ? `, predicted ${word(this.replay.text(reading.token))} with confidence ${number(reading.confidence)}` : "";
    token.setAttribute("aria-label", `position ${place}: ${token.textContent.trim() || "mask"}, ${role.label}${certain}`);
    token.classList.add("active");
    this.reveal(place);
    this.list.setAttribute("aria-activedescendant", token.id);
  }
}
