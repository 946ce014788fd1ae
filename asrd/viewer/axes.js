// Axes: round numbers for a range, and numbers and units around a picture. They are text of the page, so that they stay
// sharp whatever the picture's size.

// Round numbers from 0 up to `most`, about `wanted` of them; `least` is the smallest difference of two.
function roundTicks(most, wanted = 4, least = 0) {
  const rough = Math.max(most / wanted, least, 1e-9), power = 10 ** Math.floor(Math.log10(rough) + 1e-9);
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough * (1 - 1e-9));
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => Number((i * step).toPrecision(6)));
}

// Round numbers of forward passes, and the last pass itself.
function passTicks(passes, wanted) {
  const ticks = roundTicks(passes, wanted, 1), step = ticks.length > 1 ? ticks[1] : passes;
  return [...ticks.filter((tick) => passes - tick > 0.6 * step), passes];
}

// The picture with axes beside it. sides: { left, right, bottom }, each { unit, ticks: [[share, text], ...] }; shares of
// the picture's width from the left, of its height from the top.
function withAxes(picture, sides) {
  const frame = make("div", { class: "frame" }, picture);
  for (const [side, { unit, ticks }] of Object.entries(sides)) {
    const numbers = make("div", { class: "numbers" }, ...ticks.map(([share, text]) => {
      const tick = make("span", { text: String(text) });
      tick.style[side === "bottom" ? "left" : "top"] = `${100 * share}%`;
      return tick;
    }));
    frame.append(make("div", { class: `axis ${side}`, "aria-hidden": "true" }, numbers, make("span", { class: "unit", text: unit })));
  }
  return frame;
}
