// Lines over time in SVG: raw dots, a smoothed line per policy, axes, a legend with the latest value, and a read-out
// under the pointer or the arrow keys. One class; everything it draws is made again when the data or the width change.

import { clock, duration, element } from "./format.js";

const NS = "http://www.w3.org/2000/svg";
const MARGIN = { top: 10, right: 14, bottom: 42, left: 46 };
const HEIGHT = 256;
const SHOWN_POINTS = 600; // per policy; more than the pixels can show
const COLOURS = 8;
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800];

export class LineChart {
  // options: {name, format(value), domain: [low, high] | null, smoothing: points on each side, empty: text}
  constructor(figure, options) {
    this.options = options;
    this.series = [];
    this.signature = "";
    this.focus = null; // [policy index, point index] under the read-out
    this.legend = element("ul", "legend");
    this.plot = element("div", "plot");
    this.svg = svg("svg", { class: "chart-svg", role: "img", tabindex: "0", height: HEIGHT });
    this.readout = element("div", "readout");
    this.readout.hidden = true;
    this.spoken = element("p", "hidden-text");
    this.spoken.setAttribute("aria-live", "polite");
    this.plot.append(this.svg, this.readout, this.spoken);
    figure.append(this.legend, this.plot);
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerdown", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", () => this.#setFocus(null));
    this.svg.addEventListener("blur", () => this.#setFocus(null));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.plot);
  }

  // points: [{t, version, value, policy}]; order: policy names that come first, with the same colours in every chart
  update(points, order) {
    const last = points[points.length - 1];
    const signature = JSON.stringify([points.length, points[0]?.t, last, order]);
    if (signature === this.signature) return;
    this.signature = signature;
    this.series = order
      .map((policy, colour) => ({ policy, colour, points: points.filter((point) => point.policy === policy) }))
      .filter((one) => one.points.length)
      .map((one) => ({ ...one, points: thin(one.points).sort((a, b) => a.t - b.t) }))
      .map((one) => ({ ...one, line: smooth(one.points, this.options.smoothing) }));
    this.focus = null;
    this.#draw();
  }

  #draw() {
    const width = Math.max(240, this.plot.clientWidth);
    const { format, name, empty } = this.options;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren();
    this.legend.replaceChildren(...this.series.map((one) => this.#legendItem(one)));
    if (!this.series.length) {
      this.svg.setAttribute("aria-label", `${name}: ${empty}`);
      this.svg.append(text(empty, { class: "empty", x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }));
      this.readout.hidden = true;
      return;
    }
    this.svg.setAttribute("aria-label", this.#summary());
    const all = this.series.flatMap((one) => one.points);
    this.start = Math.min(...all.map((point) => point.t));
    const span = Math.max(10, Math.max(...all.map((point) => point.t)) - this.start);
    const ticks = valueTicks(this.options.domain ?? extent(all.map((point) => point.value)));
    const [low, high] = [ticks[0], ticks[ticks.length - 1]];
    const right = width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    this.x = (t) => MARGIN.left + ((t - this.start) / span) * (right - MARGIN.left);
    this.y = (value) => bottom - ((value - low) / (high - low)) * (bottom - MARGIN.top);

    for (const value of ticks) {
      const y = this.y(value);
      this.svg.append(svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y, y2: y }));
      this.svg.append(text(format.tick(value), { class: "tick", x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }));
    }
    const times = timeTicks(span, (right - MARGIN.left) / 76);
    for (const seconds of times) {
      const x = this.x(this.start + seconds);
      this.svg.append(svg("line", { class: "grid tick-mark", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
      const anchor = x > right - 20 ? "end" : "middle";
      this.svg.append(text(axisTime(seconds, times[1] ?? span), { class: "tick", x, y: bottom + 18, "text-anchor": anchor }));
    }
    const middle = { x: (MARGIN.left + right) / 2, y: bottom + 36, "text-anchor": "middle" };
    this.svg.append(text("time since the first point", { class: "tick", ...middle }));
    for (const one of this.series) this.#drawSeries(one);
    this.marks = svg("g", { class: "marks" });
    this.svg.append(this.marks);
    this.#showFocus();
  }

  #drawSeries(one) {
    const group = svg("g", { class: `series c${one.colour % COLOURS}` });
    const smoothed = this.options.smoothing > 0;
    for (const point of one.points) {
      const dot = { cx: round(this.x(point.t)), cy: round(this.y(point.value)), r: smoothed ? 2 : 2.5 };
      group.append(svg("circle", { class: smoothed ? "raw" : "point", ...dot }));
    }
    const path = one.line.map((value, i) => `${i ? "L" : "M"}${round(this.x(one.points[i].t))} ${round(this.y(value))}`);
    const dash = one.colour < COLOURS ? {} : { "stroke-dasharray": "6 3" };
    group.prepend(svg("path", { class: "line", d: path.join(""), ...dash }));
    this.svg.append(group);
  }

  #legendItem(one) {
    const item = element("li");
    item.append(element("i", `swatch c${one.colour % COLOURS}`), element("span", "legend-name", one.policy));
    item.append(element("b", "", this.options.format.value(one.line[one.line.length - 1])));
    return item;
  }

  #summary() {
    const { name, format } = this.options;
    const parts = this.series.map((one) => {
      const ends = [one.line[0], one.line[one.line.length - 1]].map(format.value);
      return `${one.policy} from ${ends[0]} to ${ends[1]} over ${one.points.length} points`;
    });
    return `${name} over time: ${parts.join("; ")}. Left and right arrow keys read single points.`;
  }

  #point(event) {
    if (!this.series.length) return;
    const box = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    this.series.forEach((one, s) =>
      one.points.forEach((point, p) => {
        const distance = Math.abs(this.x(point.t) - x) + 0.25 * Math.abs(this.y(one.line[p]) - y);
        if (best === null || distance < best.distance) best = { distance, at: [s, p] };
      }),
    );
    this.#setFocus(best.at);
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.#setFocus(null);
    if (!step || !this.series.length) return;
    event.preventDefault();
    const [s, p] = this.focus ?? [0, this.series[0].points.length - (step > 0 ? 1 : 0)];
    this.#setFocus([s, Math.min(Math.max(p + step, 0), this.series[s].points.length - 1)]);
    this.spoken.textContent = this.readout.textContent;
  }

  #setFocus(focus) {
    this.focus = focus;
    if (this.series.length) this.#showFocus();
  }

  // The read-out: the point in focus, and of every other policy the one nearest in time.
  #showFocus() {
    this.marks.replaceChildren();
    this.readout.hidden = this.focus === null;
    if (this.focus === null) return;
    const { format, smoothing } = this.options;
    const at = this.series[this.focus[0]].points[this.focus[1]];
    const x = this.x(at.t);
    this.marks.append(svg("line", { class: "cross", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    const rows = [element("p", "small", `${duration(at.t - this.start)} after the first point, ${clock(at.t)}`)];
    this.series.slice(0, COLOURS).forEach((one, s) => {
      const index = s === this.focus[0] ? this.focus[1] : nearest(one.points, at.t);
      const point = one.points[index];
      const dot = { cx: this.x(point.t), cy: this.y(point.value), r: 4.5 };
      this.marks.append(svg("circle", { class: `focus c${one.colour % COLOURS}`, ...dot }));
      const row = element("p", "readout-row");
      row.append(element("i", `swatch c${one.colour % COLOURS}`));
      row.append(element("span", "legend-name", `${one.policy} v${point.version}`));
      row.append(element("b", "", format.value(point.value)));
      if (smoothing) row.append(element("span", "small", `smoothed ${format.value(one.line[index])}`));
      rows.push(row);
    });
    this.readout.replaceChildren(...rows);
    const width = this.plot.clientWidth;
    const left = x > width / 2 ? x - this.readout.offsetWidth - 12 : x + 12;
    this.readout.style.left = `${Math.max(0, Math.min(left, width - this.readout.offsetWidth))}px`;
  }
}

export function svg(tag, attributes) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function text(content, attributes) {
  const made = svg("text", attributes);
  made.textContent = content;
  return made;
}

const round = (value) => Math.round(value * 10) / 10;

// Evenly chosen points, the first and the last among them.
function thin(points) {
  if (points.length <= SHOWN_POINTS) return points;
  const step = (points.length - 1) / (SHOWN_POINTS - 1);
  return Array.from({ length: SHOWN_POINTS }, (_, i) => points[Math.round(i * step)]);
}

// A centred mean with weights that fall linearly to zero beyond `side` points; near the ends over what there is.
function smooth(points, side) {
  return points.map((_, i) => {
    let [sum, weights] = [0, 0];
    for (let j = Math.max(0, i - side); j <= Math.min(points.length - 1, i + side); j++) {
      const weight = side + 1 - Math.abs(j - i);
      sum += weight * points[j].value;
      weights += weight;
    }
    return sum / weights;
  });
}

function extent(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return high - low < 1e-9 ? [low - 0.5, high + 0.5] : [low, high];
}

// Round values (1, 2 or 5 times a power of ten apart) that enclose the extent.
function valueTicks([low, high]) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const [first, last] = [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

function timeTicks(span, most) {
  const step = TIME_STEPS.find((size) => span / size <= most) ?? span;
  return Array.from({ length: Math.floor(span / step) + 1 }, (_, i) => i * step);
}

function axisTime(seconds, step) {
  if (seconds === 0) return "0";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const whole = Math.floor(seconds / 60);
  if (seconds < 3600) return step % 60 && seconds % 60 ? `${whole}:${String(Math.round(seconds % 60)).padStart(2, "0")} min` : `${whole} min`;
  return seconds < 86400 ? `${+(seconds / 3600).toFixed(1)} h` : `${+(seconds / 86400).toFixed(1)} d`;
}

function nearest(points, t) {
  let best = 0;
  for (let i = 1; i < points.length; i++) {
    if (Math.abs(points[i].t - t) < Math.abs(points[best].t - t)) best = i;
  }
  return best;
}
