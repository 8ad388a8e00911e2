// Numbers and durations as words, and the few DOM helpers. Peer-supplied text only ever becomes textContent.

export const byId = (id) => document.getElementById(id);

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const count = (value) => (isNumber(value) ? whole.format(value) : "–");

export const rate = (value) => (isNumber(value) ? (value < 100 ? tenth : whole).format(value) : "–");

export const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(1)} %` : "–");

export const decimal = (value) => (isNumber(value) ? value.toFixed(3) : "–");

export const megabytes = (value) =>
  !isNumber(value) ? "–" : value < 1000 ? `${whole.format(value)} MB` : `${tenth.format(value / 1000)} GB`;

export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

// 0–59 s, then minutes, then hours and minutes, then days and hours.
export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return s % 60 && minutes < 10 ? `${minutes} min ${s % 60} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export const ago = (seconds) => (!isNumber(seconds) ? "never" : seconds < 2 ? "now" : `${duration(seconds)} ago`);

export const clock = (unixSeconds) =>
  isNumber(unixSeconds) ? new Date(unixSeconds * 1000).toLocaleTimeString("en-GB") : "–";

export const shortKey = (key) => String(key ?? "").slice(0, 8);

export const words = (name) => String(name ?? "").replaceAll("_", " ").replaceAll("+", " + ");

// Changing text only when it differs keeps a selection alive while the page updates every second.
export function setText(element, text) {
  const value = String(text);
  if (element.textContent !== value) element.textContent = value;
}

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = String(text);
  return made;
}

// A <dl>'s rows, replaced only when one of them changed. Each row: [term, value, optional full value].
export function setFacts(list, rows) {
  const signature = JSON.stringify(rows);
  if (list.dataset.signature === signature) return;
  list.dataset.signature = signature;
  list.replaceChildren(
    ...rows.map(([term, value, full]) => {
      const row = element("div");
      const data = element("dd", "", value);
      if (full) data.title = full;
      row.append(element("dt", "", term), data);
      return row;
    }),
  );
}
