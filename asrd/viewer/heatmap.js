// Heatmap: roles by position (across) and forward pass (down), on a canvas. One pixel per cell is painted once and
// scaled; the clock's line and the chosen position are drawn over it. Its height is the clock's, the same for every
// decoder: one that needs fewer passes fills less of it.

const PASS_HEIGHT = 3, LEAST_HEIGHT = 160, MOST_HEIGHT = 360; // pixels
const MARK_FROM = 6; // smallest cell, in pixels, in which anchors are marked
const MOST_BLOCKS = 6; // numbers at the axis of positions

class Heatmap {
  constructor(replay, ticks, handlers) {
    this.replay = replay;
    this.ticks = ticks;
    this.height = Math.min(Math.max(PASS_HEIGHT * ticks, LEAST_HEIGHT), MOST_HEIGHT);
    this.canvas = make("canvas", { role: "img", "aria-label": this._summary() });
    const passes = replay.count * replay.perStep;
    const caption = make("figcaption", {}, make("b", { text: "roles" }), make("span", { text: `${replay.header.decoder}: ${passes} of ${ticks} ${replay.units}` }));
    this.element = make("figure", { class: "heatmap" }, caption, withAxes(this.canvas, this._axes()));
    this.canvas.addEventListener("pointermove", (event) => handlers.hover(this._cell(event), event));
    this.canvas.addEventListener("pointerleave", () => handlers.leave());
    this.canvas.addEventListener("click", (event) => handlers.pick(this._cell(event)));
  }

  _summary() {
    const { count, perStep, totals } = this.replay, last = totals[count];
    return `role of each position after each forward pass: ${count * perStep} passes, ${last.anchors} anchors, ${last.revoked} tokens revoked, ${last.edited} edited`;
  }

  _axes() {
    const { length, header } = this.replay, blocks = Math.ceil(length / header.block_length), ticks = [];
    const stride = Math.ceil(blocks / MOST_BLOCKS) * header.block_length;
    for (let place = 0; place < length - 0.4 * stride; place += stride) ticks.push([place / length, place]);
    const bottom = { unit: "position", ticks: [...ticks, [1, length]] };
    return { left: { unit: this.replay.units, ticks: passTicks(this.ticks, 6).map((tick) => [tick / this.ticks, tick]) }, bottom };
  }

  // Paint everything that does not move; called after a change of size or theme.
  paint() {
    const { replay } = this, { length, count } = replay;
    this.width = this.canvas.clientWidth || 600;
    this.cellWidth = this.width / length;
    this.cellHeight = (this.height * replay.perStep) / this.ticks;
    this.context = fitCanvas(this.canvas, this.width, this.height);
    this.ink = colour("ink");
    this.veil = colour("veil");
    const palette = ROLES.map((role) => rgb(colour(`heat-${role.name}`)));
    const image = new ImageData(length, Math.max(count, 1));
    for (let i = 0; i < count * length; i++) image.data.set(palette[replay.roles[length + i]], 4 * i);
    this.picture = document.createElement("canvas");
    this.picture.width = length;
    this.picture.height = Math.max(count, 1);
    this.picture.getContext("2d").putImageData(image, 0, 0);
    this.scaled = document.createElement("canvas");
    this.scaled.width = this.canvas.width;
    this.scaled.height = this.canvas.height;
    this._scale(this.scaled.getContext("2d"));
  }

  _scale(context) {
    const { replay, cellWidth, cellHeight } = this, ratio = window.devicePixelRatio || 1;
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.picture, 0, 0, this.width, replay.count * cellHeight);
    context.fillStyle = colour("line");
    const offset = replay.header.offsets ? replay.header.offsets[replay.row] : 0; // of position 0 in its block
    for (let edge = replay.header.block_length - offset; edge < replay.length; edge += replay.header.block_length) {
      context.fillRect(Math.round(edge * cellWidth) - 0.5, 0, 1, replay.count * cellHeight);
    }
    this._marks(context);
  }

  // Revocations are always crossed out, edits underlined; anchors get a diamond if the cells are large enough.
  _marks(context) {
    const { replay, cellWidth, cellHeight } = this, size = Math.min(cellWidth, cellHeight);
    context.lineWidth = 1.4;
    context.strokeStyle = context.fillStyle = colour("heat-cross");
    for (let step = 1; step <= replay.count; step++) {
      const events = replay.steps[step - 1], y = (step - 0.5) * cellHeight;
      for (const place of events.revoke || []) {
        const x = (place + 0.5) * cellWidth, r = Math.max(2.2, Math.min(4, size / 2 - 1));
        context.beginPath();
        context.moveTo(x - r, y - r); context.lineTo(x + r, y + r);
        context.moveTo(x + r, y - r); context.lineTo(x - r, y + r);
        context.stroke();
      }
      for (const place of (events.edit || [[]])[0]) {
        const x = (place + 0.5) * cellWidth, r = Math.max(1.6, Math.min(4, size / 2 - 1));
        context.beginPath();
        context.moveTo(x - r, y + r / 2); context.lineTo(x + r, y + r / 2);
        context.stroke();
      }
      if (size < MARK_FROM) continue;
      for (const place of events.anchor || []) {
        const x = (place + 0.5) * cellWidth, r = Math.min(3, size / 2 - 1);
        context.beginPath();
        context.moveTo(x, y - r); context.lineTo(x + r, y); context.lineTo(x, y + r); context.lineTo(x - r, y);
        context.fill();
      }
    }
  }

  show(tick, chosen) {
    if (!this.context) return;
    const { context, cellWidth, cellHeight, replay } = this, y = (tick / this.ticks) * this.height, end = replay.count * cellHeight;
    context.clearRect(0, 0, this.width, this.height);
    context.drawImage(this.scaled, 0, 0, this.width, this.height);
    context.fillStyle = this.veil;
    if (y < end) context.fillRect(0, y, this.width, end - y);
    context.fillStyle = this.ink;
    context.fillRect(0, Math.min(y, this.height - 2), this.width, tick ? 2 : 0);
    if (chosen !== null) {
      context.strokeStyle = this.ink;
      context.lineWidth = 1.5;
      const width = Math.max(cellWidth, 3);
      context.strokeRect((chosen + 0.5) * cellWidth - width / 2, 0.75, width, end - 1.5);
    }
  }

  _cell(event) {
    const box = this.canvas.getBoundingClientRect(), { replay } = this;
    const place = Math.floor(((event.clientX - box.left) / box.width) * replay.length);
    const step = Math.floor((event.clientY - box.top) / this.cellHeight) + 1;
    if (place < 0 || place >= replay.length || step < 1 || step > replay.count) return null;
    return { place, step };
  }
}

function rgb(hex) {
  const value = parseInt(hex.slice(1), 16);
  return [(value >> 16) & 255, (value >> 8) & 255, value & 255, 255];
}
