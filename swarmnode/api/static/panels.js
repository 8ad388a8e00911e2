// Everything below the charts: nodes, staleness, refusals, contribution, events, facts.

import { svg, text } from "./charts.js";
import {
  ago, byId, clock, count, decimal, duration, element, isNumber, megabytes, percent, plural, rate, setFacts, setText, shortKey, words,
} from "./format.js";

const MAX_ROWS = 200;
const MAX_EVENTS = 200;
const MAX_BARS = 16;

// What a person should know about a refusal; a reason that is not here is shown by its name alone.
const REASONS = {
  oversized: "larger than the wire allows",
  malformed: "could not be read",
  wrong_protocol: "another protocol version",
  wrong_run: "meant for another run",
  wrong_kind: "another kind of message than asked for",
  bad_signature: "signature does not match",
  wrong_sender: "not from the key that it names",
  replayed: "seen before",
  unknown_policy: "a policy that this run does not know",
  unknown_task: "a task that this run does not have",
  wrong_seed: "a prompt that the sender was not given",
  wrong_sampling: "sampled under other rules",
  ragged_group: "lengths that do not fit together",
  bad_logprobs: "log-probs that are not finite or above 0",
  bad_tokens: "tokens outside the vocabulary",
  bad_versions: "version list that does not cover the tokens",
  future_version: "a version not yet published",
  too_stale: "older than the staleness bound",
  prompt_mismatch: "prompt is not the one of its seed",
  reward_mismatch: "reward is not what scoring gives",
  no_credit: "more than the learner asked for",
  wrong_hash: "content does not match its hash",
  not_found: "asked for something not here",
  not_a_learner: "sent to a node that does not train",
  busy: "this node had too much to do",
  verifier_failed: "could not be checked here",
};

const COLUMNS = [
  { title: "Node", cell: nameCell, head: true },
  { title: "Role", value: (row) => words(row.role) },
  { title: "State", cell: stateCell },
  { title: "Policy", value: (row) => row.policy ?? "–" },
  { title: "Version, lag", cell: versionCell },
  { title: "Groups/min", value: (row) => rate(row.groups_per_min), number: true },
  { title: "Tokens/s", value: (row) => rate(row.tokens_per_s), number: true },
  { title: "Accepted", value: (row) => count(row.accepted), number: true },
  { title: "Refused", value: (row) => count(row.refused), number: true, warn: (row) => row.refused > 0 },
  { title: "Updates", value: (row) => count(row.updates), number: true },
  { title: "Accuracy", value: (row) => percent(row.accuracy), number: true },
  { title: "Memory", value: (row) => megabytes(row.rss_mb), number: true },
];

function nameCell(cell, row) {
  fill(cell, [
    ["span", "node-name", row.name || "unnamed"],
    ["code", "key", shortKey(row.key)],
    ...(row.self ? [["span", "chip", "this node"]] : []),
  ]);
  cell.title = `${row.name}\n${row.key}`;
}

function versionCell(cell, row) {
  const known = isNumber(row.version);
  const lag = row.lag === 0 ? "newest" : `${count(row.lag)} behind`;
  cell.classList.toggle("none", !known);
  fill(cell, [["span", "", known ? `v${row.version}` : "–"], ...(known && isNumber(row.lag) ? [["span", "small", lag]] : [])]);
}

function stateCell(cell, row) {
  const live = row.state === "live";
  fill(cell, [
    ["i", live ? "dot dot-live" : "dot dot-gone", ""],
    ["span", live ? "" : "bad", live ? "live" : row.state],
    ...(live ? [] : [["span", "small", `seen ${ago(row.last_seen_s)}`]]),
  ]);
}

function fill(parent, parts) {
  const signature = JSON.stringify(parts);
  if (parent.dataset.signature === signature) return;
  parent.dataset.signature = signature;
  parent.replaceChildren(...parts.flatMap(([tag, className, content]) => [element(tag, className, content), " "]));
}

export class NodesTable {
  constructor(parent) {
    const table = element("table", "nodes");
    table.setAttribute("role", "table"); // rows become cards on a narrow screen, which would hide the table's roles
    table.setAttribute("aria-labelledby", "nodes-title");
    const heads = element("tr");
    heads.setAttribute("role", "row");
    for (const column of COLUMNS) {
      const head = element("th", column.number ? "number" : "", column.title);
      head.scope = "col";
      head.setAttribute("role", "columnheader");
      heads.append(head);
    }
    const top = element("thead");
    top.setAttribute("role", "rowgroup");
    top.append(heads);
    this.body = element("tbody");
    this.body.setAttribute("role", "rowgroup");
    table.append(top, this.body);
    parent.append(table);
    this.rows = new Map();
  }

  update(nodes) {
    const sorted = [...nodes].sort(
      (a, b) =>
        (a.state !== "live") - (b.state !== "live") ||
        rank(a.role) - rank(b.role) ||
        String(a.name).localeCompare(String(b.name)) ||
        String(a.key).localeCompare(String(b.key)),
    );
    const shown = sorted.slice(0, MAX_ROWS);
    const keys = new Set(shown.map((row) => row.key));
    for (const [key, line] of this.rows) {
      if (!keys.has(key)) {
        line.remove();
        this.rows.delete(key);
      }
    }
    shown.forEach((row, index) => {
      const line = this.rows.get(row.key) ?? this.#add(row.key);
      if (this.body.children[index] !== line) this.body.insertBefore(line, this.body.children[index] ?? null);
      line.classList.toggle("gone", row.state !== "live");
      COLUMNS.forEach((column, i) => {
        const cell = line.children[i];
        if (column.cell) column.cell(cell, row);
        else {
          const value = column.value(row);
          setText(cell, value);
          cell.classList.toggle("none", value === "–");
        }
        if (column.warn) cell.classList.toggle("warn", column.warn(row));
      });
    });
    byId("nodes-more").hidden = sorted.length <= MAX_ROWS;
    setText(byId("nodes-more"), `and ${count(sorted.length - MAX_ROWS)} more`);
  }

  #add(key) {
    const line = element("tr");
    line.setAttribute("role", "row");
    for (const column of COLUMNS) {
      const cell = element(column.head ? "th" : "td", column.number ? "number" : "");
      if (column.head) cell.scope = "row";
      cell.setAttribute("role", column.head ? "rowheader" : "cell");
      cell.dataset.label = column.title;
      line.append(cell);
    }
    this.rows.set(key, line);
    return line;
  }
}

const rank = (role) => {
  const at = ["learner", "worker", "relay"].findIndex((known) => String(role).includes(known));
  return at < 0 ? 3 : at;
};

// Bars 0..S with the bound drawn after S; what lies beyond the bound would be a broken promise, and is red.
export function showStaleness(state) {
  const bound = state.run?.max_staleness ?? 0;
  const seen = Object.entries(state.staleness ?? {}).map(([key, value]) => [Number(key), value]);
  const total = seen.reduce((sum, [, value]) => sum + value, 0);
  const largest = Math.max(0, ...seen.map(([key]) => key));
  const beyond = seen.reduce((sum, [key, value]) => sum + (key > bound ? value : 0), 0);
  const note = !total
    ? `Nothing trained on yet. The bound S is ${bound}.`
    : beyond
      ? `${plural(beyond, "group")} beyond the bound S = ${bound}.`
      : `Largest ${Math.max(largest, state.max_staleness_seen ?? 0)}, bound S = ${bound}: no group was staler.`;
  setText(byId("staleness-note"), note);
  byId("staleness-note").classList.toggle("bad", beyond > 0);

  const last = Math.max(largest, Math.min(bound, MAX_BARS - 1));
  const width = Math.max(1, Math.ceil((last + 1) / MAX_BARS)); // staleness values per bar
  const bars = Array.from({ length: Math.floor(last / width) + 1 }, () => 0);
  for (const [key, value] of seen) bars[Math.floor(key / width)] += value;
  const parent = byId("staleness-chart");
  const signature = JSON.stringify([bars, bound]);
  if (parent.dataset.signature === signature) return;
  parent.dataset.signature = signature;
  parent.replaceChildren(drawBars(bars, width, bound, note));
}

function drawBars(bars, width, bound, label) {
  const [w, h, bottom, top] = [320, 170, 138, 24];
  const slot = (w - 20) / Math.max(bars.length, 4);
  const most = Math.max(1, ...bars);
  const picture = svg("svg", { class: "bars", viewBox: `0 0 ${w} ${h}`, role: "img" });
  const name = (i) => (width === 1 ? `${i}` : `${i * width}–${(i + 1) * width - 1}`);
  picture.setAttribute("aria-label", `${label} ${bars.map((value, i) => `staleness ${name(i)}: ${value}`).join(", ")}`);
  bars.forEach((value, i) => {
    const height = (value / most) * (bottom - top);
    const x = 10 + i * slot;
    const box = { x: x + slot * 0.14, width: slot * 0.72, y: bottom - height, height, rx: 2 };
    picture.append(svg("rect", { class: i * width > bound ? "bar bar-bad" : "bar", ...box }));
    if (value) picture.append(text(count(value), { class: "bar-value", x: x + slot / 2, y: bottom - height - 5 }));
    picture.append(text(name(i), { class: "tick", x: x + slot / 2, y: bottom + 15, "text-anchor": "middle" }));
  });
  picture.append(svg("line", { class: "axis", x1: 10, x2: w - 10, y1: bottom, y2: bottom }));
  const at = 10 + ((bound + 1) / width) * slot;
  if (at <= w - 8) {
    picture.append(svg("line", { class: "bound", x1: at, x2: at, y1: 6, y2: bottom }));
    picture.append(text(`S = ${bound}`, { class: "bound-text", x: at - 5, y: 14, "text-anchor": "end" }));
  }
  picture.append(text("versions behind when trained on", { class: "tick", x: w / 2, y: h - 2, "text-anchor": "middle" }));
  return picture;
}

const AGE_COLUMNS = [
  ["Versions ago", (age) => (age <= 2 ? `${age}` : `${age / 2 + 1}–${age}`)],
  ["Tokens", (_, row) => count(row.tokens)],
  ["Mean ratio", (_, row) => decimal(row.ratio_mean)],
  ["Largest ratio", (_, row) => decimal(row.ratio_max)],
  ["KL to μ", (_, row) => decimal(row.kl)],
  ["Effective", (_, row) => percent(row.token_ess_ratio)],
  ["Clipped", (_, row) => percent(row.clip_fraction)],
  ["Masked", (_, row) => percent(row.mask_fraction)],
  ["Entropy", (_, row) => decimal(row.entropy)],
];

// One line per age of the tokens of the last update: where staleness hurts, it shows here first.
export function showAges(learner) {
  const rows = Object.entries(learner?.by_age ?? {})
    .map(([age, row]) => [Number(age), row])
    .sort((a, b) => a[0] - b[0]);
  byId("ages").hidden = !rows.length;
  const cells = rows.map(([age, row]) => AGE_COLUMNS.map(([, value]) => value(age, row)));
  replaceWhenChanged(byId("ages-heads"), AGE_COLUMNS.length, () =>
    AGE_COLUMNS.map(([title]) => headCell(title, "col")),
  );
  replaceWhenChanged(byId("ages-rows"), cells, () =>
    cells.map((line) => {
      const made = element("tr");
      made.append(headCell(line[0], "row"), ...line.slice(1).map((value) => element("td", "", value)));
      return made;
    }),
  );
}

function headCell(title, scope) {
  const made = element("th", "", title);
  made.scope = scope;
  return made;
}

function reasonList(refused) {
  const most = Math.max(1, ...refused.map(([, value]) => value));
  const list = element("ul", "reasons");
  for (const [reason, value] of refused) {
    const item = element("li");
    const bar = element("div", "reason-bar");
    const filled = element("i");
    filled.style.width = `${Math.max(2, (100 * value) / most)}%`;
    bar.append(filled);
    const head = element("p");
    head.append(element("span", "reason-name", words(reason)), element("b", "", count(value)));
    item.append(head, bar);
    if (Object.hasOwn(REASONS, reason)) item.append(element("p", "small", REASONS[reason]));
    list.append(item);
  }
  return list;
}

const reasonsOf = (counts) =>
  Object.entries(counts ?? {})
    .filter(([, value]) => value > 0)
    .sort((a, b) => b[1] - a[1]);

export function showRefused(state) {
  const refused = reasonsOf(state.refused);
  replaceWhenChanged(byId("refused"), refused, () =>
    refused.length
      ? [reasonList(refused)]
      : [element("p", "good", "Nothing was refused."), element("p", "small", "All that came from peers kept the run's rules.")],
  );
}

export function showGroups(state) {
  const groups = state.groups ?? {};
  const external = Object.entries(groups.external_consumed ?? {}).sort((a, b) => b[1] - a[1]);
  setFacts(byId("groups"), [
    ["Trained on", count(groups.consumed)],
    ["Waiting", count(groups.waiting)],
    ["Grew too stale", count(groups.stale)],
    ...external.slice(0, 12).map(([name, value]) => [`From ${name}`, count(value)]),
  ]);
}

export function showContribution(state) {
  const mine = state.my_contribution ?? {};
  const refused = reasonsOf(mine.refused);
  const total = refused.reduce((sum, [, value]) => sum + value, 0);
  const lines = [];
  if (!mine.accepted && !total) lines.push(["p", "small", "This node has sent no groups to a learner yet."]);
  else {
    lines.push(["p", "", `${plural(mine.accepted ?? 0, "group")} accepted, ${total ? `${count(total)} refused` : "none refused"}`]);
    if (isNumber(mine.last_accepted_s)) lines.push(["p", "small", `Last accepted: ${ago(mine.last_accepted_s)}`]);
  }
  for (const [reason, value] of refused) lines.push(["p", "small", `${words(reason)}: ${count(value)}`]);
  if (mine.last_refusal) lines.push(["p", "small bad", `Last refusal: ${mine.last_refusal}`]);
  fill(byId("contribution"), lines);
}

export function showEvents(events) {
  const shown = events.slice(-MAX_EVENTS).reverse();
  replaceWhenChanged(byId("events"), shown, () =>
    shown.length
      ? shown.map((event) => {
          const item = element("li", `event-${["warning", "error"].includes(event.level) ? event.level : "info"}`);
          const time = element("time", "", clock(event.t));
          if (isNumber(event.t)) time.dateTime = new Date(event.t * 1000).toISOString();
          item.append(time, element("span", "level", event.level), element("span", "", event.text));
          return item;
        })
      : [element("li", "small", "Nothing has happened yet.")],
  );
}

export function showFacts(state) {
  const { node = {}, run = {}, policy } = state;
  setFacts(byId("facts"), [
    ["Run", shortKey(run.id), run.id],
    ["Preset and mode", [run.preset, run.mode].filter(Boolean).join(", ")],
    ["Model", run.model ?? "–"],
    ["Batch", `${plural(run.batch_groups, "group")} of ${plural(run.group_size, "completion")}`],
    ["Staleness bound S", count(run.max_staleness)],
    ...(policy ? [["Policy", `${policy.name ?? ""} ${shortKey(policy.id)}`.trim(), policy.id]] : []),
    ["Node key", shortKey(node.key), node.key],
    ["Listens on", (node.listen_addrs ?? []).join("\n") || "nothing"],
    ...(node.seeds?.length ? [["Seeds", node.seeds.join("\n")]] : []),
    ["Data directory", node.data_dir ?? "–"],
    ["Memory of this node", megabytes(node.rss_mb)],
    ["Software", node.software ?? "–"],
  ]);
  setText(byId("me-role"), `${node.role ?? ""}, up ${duration(node.uptime_s)}`);
}

function replaceWhenChanged(parent, value, make) {
  const signature = JSON.stringify(value);
  if (parent.dataset.signature === signature) return;
  parent.dataset.signature = signature;
  parent.replaceChildren(...make());
}
