// Canvas: the tokens of one answer while it is being decoded, each with its role and its mark, as in the viewer.

class Canvas {
  constructor(length) {
    this.step = 0;
    this.end = length; // where padding begins
    this.texts = Array(length).fill(null); // null: a mask
    this.anchors = new Set();
    this.counts = { pending: 0, anchors: 0, revoked: 0, edited: 0 };
    this.element = make("div", { class: "text", role: "img", "aria-label": "tokens of the answer" });
    this.cells = this.texts.map((_, place) => ({
      gap: document.createTextNode(place ? " " : ""),
      token: make("span", { class: "tok", data: { role: "mask", place, ghost: "··" } }),
    }));
    this.element.append(...this.cells.flatMap((cell) => [cell.gap, cell.token]));
  }

  // One forward pass, as the server tells it.
  apply(news) {
    this.step = news.step;
    const fresh = new Set(), edited = new Map(), revoked = new Map(), pending = new Set(news.pending);
    for (const place of news.revoked) { revoked.set(place, this.texts[place]); this.texts[place] = null; this.anchors.delete(place); }
    for (const [place, text] of news.drafted) { this.texts[place] = text; fresh.add(place); }
    for (const [place, text] of news.edited) { edited.set(place, this.texts[place]); this.texts[place] = text; }
    for (const place of news.anchors) this.anchors.add(place);
    if (news.filled !== null) this.end = news.filled;
    this.counts.pending = news.pending.length;
    this.counts.anchors += news.anchors.length;
    this.counts.revoked += news.revoked.length;
    this.counts.edited += news.edited.length;
    this.cells.forEach((cell, place) => {
      if (place >= this.end) { cell.gap.data = ""; cell.token.hidden = true; return; }
      const role = revoked.has(place) ? REVOKED : edited.has(place) ? EDITED : this.texts[place] === null ? MASK
        : this.anchors.has(place) ? ANCHOR : pending.has(place) ? PENDING : fresh.has(place) ? DRAFT : FINAL;
      this._paint(cell, place, role, role === REVOKED ? revoked.get(place) : this.texts[place], edited.get(place));
    });
  }

  // Nothing follows: what was being checked is settled, if the answer has ended by itself.
  finish(whole) {
    for (const { token } of this.cells) {
      if (whole && !token.hidden && token.dataset.role !== "mask" && token.dataset.role !== "anchor") token.dataset.role = "final";
      delete token.dataset.before;
    }
  }

  get tokens() { return this.texts.slice(0, this.end).filter((text) => text !== null).length; }

  _paint(cell, place, role, text, before) {
    const shown = text || "", lines = (shown.match(/\n/g) || []).length;
    cell.gap.data = !place ? "" : role === MASK ? " " : lines ? "\n".repeat(Math.min(lines, 2)) : /^\s/.test(shown) ? " " : "";
    cell.token.dataset.role = ROLES[role].name;
    cell.token.textContent = role === MASK ? "" : shown.trim() || "␣";
    if (before !== undefined) cell.token.dataset.before = word(before || "");
    else delete cell.token.dataset.before;
  }
}
