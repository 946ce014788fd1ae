// Replay: one row of a trace (docs/trace.md) as arrays over steps and positions.

const MASK = 0, DRAFT = 1, PENDING = 2, ANCHOR = 3, REVOKED = 4, FINAL = 5, EDITED = 6;
const ROLES = [
  { name: "mask", label: "mask", meaning: "no token yet" },
  { name: "draft", label: "draft", meaning: "committed in this pass" },
  { name: "pending", label: "pending", meaning: "may still be revoked or edited" },
  { name: "anchor", label: "anchor", meaning: "trusted; guides the masks" },
  { name: "revoked", label: "revoked", meaning: "failed its check in this pass" },
  { name: "final", label: "final", meaning: "committed for good" },
  { name: "edited", label: "edited", meaning: "replaced in this pass" },
];

class Replay {
  constructor(records, row) {
    this.header = records[0];
    this.row = row;
    this.length = this.header.length;
    this.perStep = this.header.forwards_per_step;
    this.unit = this.header.offsets ? "step" : "pass"; // on block-diffusion models a step may share its forward pass
    this.units = this.header.offsets ? "steps" : "forward passes";
    this.texts = Object.assign({}, ...records.map((record) => record.texts || {}));
    this.steps = []; // of this row, from 1 on
    this.times = [];
    for (const record of records) {
      const found = record.rows && record.rows.find((r) => r.row === row);
      if (found) {
        this.steps.push(found);
        this.times.push(record.ms);
      }
    }
    this.count = this.steps.length;
    this.error = (records[records.length - 1] || {}).error || null;
    this.end = this.header.lengths ? this.header.lengths[row] : this.length; // where padding begins
    this._run();
  }

  _run() {
    const { length, count, header } = this, size = (count + 1) * length;
    const own = header.lengths ? header.lengths[this.row] : length; // the row may be shorter than others
    this.tokens = new Int32Array(size).fill(header.mask, 0, own).fill(header.pad, own, length);
    if (header.given) this.tokens.set(header.given[this.row].slice(0, own)); // tokens that were given stay
    this.roles = new Uint8Array(size);
    this.totals = [{ roles: [length, 0, 0, 0, 0, 0, 0], drafted: 0, revoked: 0, anchors: 0, pending: 0, contradicted: 0, edited: 0, cache: [] }];
    this.witnesses = header.settings.max_edits !== undefined && this.steps.some((events) => events.witness); // wino's revoke
    const pending = new Uint8Array(length), anchors = new Uint8Array(length);
    for (let step = 1; step <= count; step++) {
      const events = this.steps[step - 1], offset = step * length, tokens = this.tokens;
      tokens.copyWithin(offset, offset - length, offset);
      const fresh = new Set();
      const edited = new Set([...(events.replace || [[]])[0], ...(events.edit || [[]])[0]]);
      for (const [places, ids] of [events.draft || [[], []], events.replace || [[], []], events.edit || [[], []]]) {
        places.forEach((place, i) => { tokens[offset + place] = ids[i]; fresh.add(place); });
      }
      for (const place of events.revoke || []) { tokens[offset + place] = header.mask; pending[place] = 0; }
      if (events.fill) {
        this.end = events.fill[0];
        tokens.fill(events.fill[1], offset + this.end, offset + length);
        pending.fill(0, this.end);
      }
      for (const place of events.keep || []) pending[place] = 0;
      for (const place of events.pend || []) pending[place] = 1;
      for (const place of events.anchor || []) anchors[place] = 1;
      const revoked = new Set(events.revoke || []), roles = [0, 0, 0, 0, 0, 0, 0];
      for (let place = 0; place < length; place++) {
        let role = FINAL;
        if (revoked.has(place)) role = REVOKED;
        else if (edited.has(place)) role = EDITED;
        else if (tokens[offset + place] === header.mask) role = MASK;
        else if (anchors[place] && !(events.fill && place >= this.end)) role = ANCHOR;
        else if (pending[place]) role = PENDING;
        else if (fresh.has(place)) role = DRAFT;
        this.roles[offset + place] = role;
        roles[role]++;
      }
      const [drafted, taken, promoted] = events.counts, last = this.totals[step - 1];
      const cache = events.cache || last.cache, open = pending.reduce((sum, flag) => sum + flag, 0);
      const contradicted = last.contradicted + (events.contradict || []).length;
      const edits = last.edited + (events.edit || [[]])[0].length;
      this.totals.push({ roles, drafted, revoked: taken, anchors: promoted, pending: open, contradicted, edited: edits, cache });
    }
  }

  // The step that the clock of forward passes has reached.
  at(tick) { return Math.min(Math.floor(tick / this.perStep), this.count); }

  role(step, place) { return this.roles[step * this.length + place]; }

  // The token to show: the current one, or the one that has just been revoked.
  token(step, place) {
    return this.tokens[(this.role(step, place) === REVOKED ? step - 1 : step) * this.length + place];
  }

  // The token before the step.
  before(step, place) { return this.tokens[Math.max(step - 1, 0) * this.length + place]; }

  padded(step, place) { return step === this.count && place >= this.end; }

  text(token) { return token in this.texts ? this.texts[token] : ` #${token}`; }

  prompt() {
    const ids = this.header.prompt[this.row].slice(this.header.padding[this.row]);
    return ids.map((token) => this.text(token)).join("").trim();
  }

  // The statistics of a step at a position: prediction, confidence, entropy, guidance, probe, and whether they are its
  // witness's; null if it was not read.
  reading(step, place) {
    const events = step > 0 ? this.steps[step - 1] : null, at = (events && events.at) || [];
    let low = 0, high = at.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (at[middle] < place) low = middle + 1; else high = middle;
    }
    if (at[low] !== place) return null;
    const of = (name) => (events[name] ? events[name][low] : 0);
    return { token: of("top1"), confidence: of("confidence"), entropy: of("entropy"), guidance: of("guidance"), probe: of("probe"), witness: (events.witness || []).includes(place) };
  }

  // The events at a position in a step, as keys of EVENTS.
  happened(step, place) {
    const events = this.steps[step - 1], found = [];
    for (const name of ["draft", "replace", "edit"]) if (events[name] && events[name][0].includes(place)) found.push(name);
    for (const name of ["contradict", "anchor", "pend", "keep", "revoke"]) if (events[name] && events[name].includes(place)) found.push(name);
    if (events.fill && place >= events.fill[0]) found.push("fill");
    return found;
  }

  // Every step that read or changed a position.
  history(place) {
    const lines = [];
    for (let step = 1; step <= this.count; step++) {
      const reading = this.reading(step, place), events = this.happened(step, place);
      if (reading || events.length) lines.push({ step, reading, events, role: this.role(step, place), token: this.token(step, place), before: this.before(step, place) });
    }
    return lines;
  }

  // The first step that revokes or edits a token, and which of the two; null if none does.
  firstChange() {
    for (let step = 1; step <= this.count; step++) {
      const events = this.steps[step - 1];
      if ((events.revoke || []).length) return { step, name: "revocation" };
      if (events.edit || events.replace) return { step, name: "edit" };
    }
    return null;
  }

  // Mean milliseconds of a step by part.
  meanTimes() {
    return this.header.parts.map((name, i) => ({
      name,
      ms: this.times.reduce((sum, times) => sum + times[i], 0) / Math.max(this.count, 1),
    }));
  }
}
