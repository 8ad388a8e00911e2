// The live page: takes the token, follows the node's state, fills the headline, and hands the rest to its panels.

import { LineChart } from "./charts.js";
import { Feed } from "./feed.js";
import { byId, clock, count, decimal, isNumber, megabytes, percent, plural, rate, setText, words } from "./format.js";
import {
  NodesTable, showAges, showContribution, showEvents, showFacts, showGroups, showRefused, showStaleness,
} from "./panels.js";

const TOKEN_KEY = "swarmnode-token";

const accuracyChart = new LineChart(byId("accuracy-chart"), {
  name: "Held-out accuracy",
  format: { value: percent, tick: (value) => `${Math.round(100 * value)} %` },
  domain: [0, 1],
  smoothing: 0,
  empty: "No evaluation yet",
});
const rewardChart = new LineChart(byId("reward-chart"), {
  name: "Reward",
  format: { value: decimal, tick: (value) => String(+value.toFixed(3)) },
  domain: null,
  smoothing: 4,
  empty: "No update yet",
});
const nodesTable = new NodesTable(byId("nodes-table"));

let lostAt = null; // when the connection was last heard, while it is lost
let heardAt = null;
let retryAt = null;

const feed = new Feed("/api/events", () => sessionStorage.getItem(TOKEN_KEY), {
  onState(state) {
    heardAt = Date.now();
    clearBanner();
    show(state);
  },
  onProblem(problem) {
    heardAt = Date.now();
    showBanner(`${problem}.`, null);
  },
  onLost(cause, at) {
    lostAt ??= heardAt ?? Date.now();
    showBanner(`Connection lost since ${clock(lostAt / 1000)}: ${cause}. What you see is from then.`, at);
  },
  onTokenNeeded() {
    byId("token-wrong").hidden = sessionStorage.getItem(TOKEN_KEY) === null;
    sessionStorage.removeItem(TOKEN_KEY);
    byId("waiting").hidden = true;
    byId("page").hidden = true;
    byId("banner").hidden = true;
    byId("token-form").hidden = false;
    byId("token").focus();
  },
});

function showBanner(text, at) {
  retryAt = at;
  setText(byId("banner-text"), text);
  byId("banner-now").hidden = at === null;
  byId("banner").hidden = false;
  byId("waiting").hidden = true;
  document.body.classList.add("lost");
  setText(byId("link-text"), "not connected");
  tick();
}

function clearBanner() {
  lostAt = retryAt = null;
  byId("banner").hidden = true;
  document.body.classList.remove("lost");
  setText(byId("link-text"), "live");
}

function tick() {
  const left = retryAt === null ? null : Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
  setText(byId("banner-retry"), left === null ? "" : left ? `Trying again in ${left} s.` : "Trying now …");
}

function show(state) {
  byId("waiting").hidden = true;
  byId("token-form").hidden = true;
  byId("page").hidden = false;
  const { node = {}, run = {}, learner, nodes = [], series = {}, events = [] } = state;
  setText(byId("run-name"), run.name || "swarmnode");
  setText(byId("run-kind"), [run.preset, run.mode].filter(Boolean).join(" · "));
  const doing = learner ? learner.state || "starting" : node.state;
  setText(byId("doing"), doing ? ` · ${doing}` : "");
  byId("doing").classList.toggle("bad", Boolean(learner?.halted));
  setText(byId("me-name"), node.name ?? "");
  const order = policyOrder(state);
  showAccuracy(state, order);
  showVersion(state);
  showGroupCounts(state);
  showNodeCounts(nodes);
  accuracyChart.update(points(series.accuracy), order);
  rewardChart.update(points(series.reward), order);
  nodesTable.update(nodes);
  showStaleness(state);
  showAges(learner);
  showRefused(state);
  showGroups(state);
  showContribution(state);
  showEvents(events);
  showFacts(state);
  showInvite(node.invite);
  byId("footer-token").hidden = sessionStorage.getItem(TOKEN_KEY) === null;
}

const points = (series) => (series ?? []).filter((point) => isNumber(point.value) && isNumber(point.t));

// This node's policy first, then the others by name: a policy has the same colour in both charts.
function policyOrder({ policy, series = {} }) {
  const names = new Set([...points(series.accuracy), ...points(series.reward)].map((point) => point.policy));
  return [...names].sort(
    (a, b) => (a !== policy?.name) - (b !== policy?.name) || String(a).localeCompare(String(b)),
  );
}

// This node's own policy if it is evaluated, else the mean over all policies that are.
function accuracyEnds({ policy, learner, series = {} }, order) {
  const all = points(series.accuracy);
  const evaluated = order.filter((name) => all.some((point) => point.policy === name));
  const names = evaluated.includes(policy?.name) ? [policy.name] : evaluated;
  const own = names.length === 1 && names[0] === policy?.name;
  const ends = names.map((name) => all.filter((point) => point.policy === name)).map((one) => [one[0], one[one.length - 1]]);
  const mean = (at) => (ends.length ? ends.reduce((sum, pair) => sum + pair[at].value, 0) / ends.length : null);
  let [before, now] = [mean(0), mean(1)];
  if (learner && (own || !ends.length)) {
    before = learner.eval_before ?? before;
    now = (learner.final ? learner.eval_after : now) ?? now ?? learner.eval_after ?? before;
  }
  return { before, now, policies: names.length };
}

function showAccuracy(state, order) {
  const { before, now, policies } = accuracyEnds(state, order);
  const known = isNumber(now);
  setText(byId("accuracy-now"), known ? percent(now) : "–");
  const change = 100 * (now - before);
  const moved = `${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(1)} points`;
  const suffix = `${policies > 1 ? `, mean of ${policies} policies` : ""}${state.learner?.final ? ", final" : ""}`;
  const note = isNumber(before) ? `${percent(before)} at start, ${moved}${suffix}` : `now${suffix}`;
  setText(byId("accuracy-note"), known ? note : "not evaluated yet");
  byId("meter-now").style.width = `${known ? 100 * clamp(now) : 0}%`;
  byId("meter-start").style.left = `${100 * clamp(before ?? 0)}%`;
  byId("meter-start").hidden = !isNumber(before);
  document.title = `${known ? `${percent(now)} · ` : ""}${state.run?.name || "swarmnode"}`;
}

const clamp = (value) => Math.min(1, Math.max(0, value));

const fetchingText = ({ what, percent: done, total_bytes, bytes_per_s }) =>
  `fetching the ${what}: ${Math.floor(done)} % of ${megabytes(total_bytes / 1e6)}, ${rate(bytes_per_s / 1e6)} MB/s`;

function showVersion({ policy, learner, transfer }) {
  setText(byId("version-now"), policy && isNumber(policy.version) ? `v${policy.version}` : "–");
  const lag = !policy ? "no policy here" : policy.lag ? `${plural(policy.lag, "version")} behind v${policy.swarm_version}` : "the newest known";
  const made = learner && `${plural(learner.updates ?? 0, "update")}, ${count(learner.published_versions ?? 0)} published`;
  const fetching = transfer && fetchingText(transfer);
  setText(byId("version-note"), made || fetching || lag);
}

function showGroupCounts({ groups = {} }) {
  setText(byId("groups-now"), count(groups.accepted ?? 0));
  const refused = groups.refused ? `${count(groups.refused)} refused` : "none refused";
  setText(byId("groups-note"), `${refused}, ${count(groups.consumed ?? 0)} trained on`);
}

function showNodeCounts(nodes) {
  const live = nodes.filter((row) => row.state === "live");
  const gone = nodes.length - live.length;
  const roles = new Map();
  for (const row of live) roles.set(row.role, (roles.get(row.role) ?? 0) + 1);
  const parts = [...roles].slice(0, 4).map(([role, many]) => plural(many, words(role)));
  setText(byId("nodes-now"), count(live.length));
  setText(byId("nodes-note"), [...parts, ...(gone ? [`${count(gone)} gone`] : [])].join(", "));
  byId("nodes-note").classList.toggle("bad", gone > 0);
}

function showInvite(invite) {
  byId("invite-box").hidden = !invite;
  byId("invite-none").hidden = Boolean(invite);
  if (invite) setText(byId("invite"), `swarmnode join ${invite}`);
}

async function copyInvite() {
  try {
    await navigator.clipboard.writeText(byId("invite").textContent);
    setText(byId("copied"), "Copied.");
  } catch {
    // Browsers give the clipboard only to pages on loopback or HTTPS.
    getSelection().selectAllChildren(byId("invite"));
    setText(byId("copied"), "Selected: press Ctrl-C to copy.");
  }
}

// A token in the address is kept for this tab and taken out of the address, so that it is not shared by accident.
function takeToken() {
  const address = new URL(location.href);
  const token = address.searchParams.get("token");
  if (token === null) return;
  sessionStorage.setItem(TOKEN_KEY, token);
  address.searchParams.delete("token");
  history.replaceState(null, "", address);
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, byId("token").value.trim());
  byId("token").value = "";
  feed.connect();
});
byId("banner-now").addEventListener("click", () => feed.connect());
byId("copy").addEventListener("click", copyInvite);
setInterval(tick, 1000);
takeToken();
feed.connect();
