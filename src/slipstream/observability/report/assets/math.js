// Pure helpers: searching, smoothing, ticks, thinning for the screen.

/** The first place in a sorted array whose value is not below `x`. */
function lowerBound(sorted, x) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The place whose value is nearest to `x`, or -1. */
function nearestPlace(sorted, x) {
  if (!sorted.length) return -1;
  const at = lowerBound(sorted, x);
  if (at === 0) return 0;
  if (at === sorted.length) return at - 1;
  return x - sorted[at - 1] <= sorted[at] - x ? at - 1 : at;
}

/**
 * An exponential moving average, corrected for its beginning. The weight is that of one `unit`, a thousandth of the whole line, so that it means the
 * same for a curve of many points and for one of few, thinned or not. What is no number stays a gap and does not enter.
 */
function smoothed(x, values, weight, unit) {
  if (!weight || values.length < 3) return values;
  const result = new Float64Array(values.length);
  let average = NaN;
  let seen = 0;
  let before = x[0] - (x[x.length - 1] - x[0]) / (x.length - 1);
  for (let at = 0; at < values.length; at++) {
    const value = values[at];
    if (Number.isFinite(value)) {
      const kept = weight ** ((x[at] - before) / (unit || 1));
      seen = kept * seen + (1 - kept);
      average = seen && !Number.isNaN(average) ? average + ((1 - kept) / seen) * (value - average) : value; // a constant stays exactly itself
      result[at] = average;
      before = x[at];
    } else result[at] = NaN;
  }
  return result;
}

function median(values) {
  const sorted = values.filter(Number.isFinite).sort((one, other) => one - other);
  if (!sorted.length) return NaN;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function mean(values) {
  let sum = 0;
  let count = 0;
  for (const value of values || []) {
    if (Number.isFinite(value)) {
      sum += value;
      count += 1;
    }
  }
  return count ? sum / count : NaN;
}

function largest(values) {
  let most = NaN;
  for (const value of values || []) if (Number.isFinite(value) && !(value <= most)) most = value;
  return most;
}

function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}

function roundDistance(range, count) {
  const raw = range / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const head = raw / power;
  return power * (head <= 1 ? 1 : head <= 2 ? 2 : head <= 5 ? 5 : 10);
}

/** Whether a range is too small against its numbers to be told apart: it is drawn as one number. */
function nearlyEqual(low, high) {
  return high - low <= Math.max(Math.abs(low), Math.abs(high)) * 1e-9;
}

const MOST_TICKS = 60; // whatever the numbers are

function linearTicks(low, high, count, whole = false) {
  let distance = roundDistance(high - low, count);
  if (whole) distance = Math.max(1, distance);
  const first = Math.ceil(low / distance - 1e-9);
  const length = Math.min(MOST_TICKS, Math.floor(high / distance + 1e-9) - first + 1);
  if (!(length > 0)) return [];
  return Array.from({ length }, (_, at) => (first + at) * distance).map((at) => ({ at, text: tickNumber(at, distance) }));
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 1) return linearTicks(low, high, count).filter((tick) => tick.at > 0);
  const ticks = [];
  const skip = Math.max(1, Math.ceil(decades / count));
  const heads = skip > 1 || decades > count / 2 ? [1] : decades > count / 3 ? [1, 3] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)) && ticks.length < MOST_TICKS; power += skip) {
    for (const head of heads) {
      const at = head * 10 ** power;
      if (at >= low * (1 - 1e-9) && at <= high * (1 + 1e-9)) ticks.push({ at, text: number(at, 3) });
    }
  }
  return ticks;
}

const SPANS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000, 31536000];

function spanTick(at, distance) {
  if (at === 0) return "0";
  if (distance < 60) return at < 60 ? `${number(at)} s` : `${Math.floor(at / 60)}:${String(Math.round(at % 60)).padStart(2, "0")}`;
  if (distance < 3600) return at < 3600 ? `${Math.round(at / 60)} min` : `${Math.floor(at / 3600)}:${String(Math.round((at % 3600) / 60)).padStart(2, "0")} h`;
  return distance < 86400 ? `${number(at / 3600)} h` : `${number(at / 86400)} d`;
}

/** Ticks of a time axis: durations, or times of the day where the person looks. */
function timeTicks(low, high, count, wall) {
  const range = high - low;
  if (range < count) {
    const ticks = linearTicks(low, high, Math.min(count, 4));
    const distance = ticks.length > 1 ? ticks[1].at - ticks[0].at : 1;
    if (!wall) return ticks.map((tick) => ({ at: tick.at, text: `${tick.text} s` }));
    return ticks.map((tick) => ({ at: tick.at, text: distance < 1 ? `${number(tick.at % 60, 4)} s` : clockText(CLOCK_SECONDS, tick.at) }));
  }
  const distance = SPANS.find((span) => range / span <= count) || roundDistance(range, count);
  const offset = wall ? new Date(low * 1000).getTimezoneOffset() * 60 || 0 : 0;
  const first = Math.ceil((low - offset) / distance - 1e-9);
  const ticks = [];
  for (let number_ = 0; number_ < MOST_TICKS && (first + number_) * distance + offset <= high; number_++) {
    const at = (first + number_) * distance + offset;
    const clock = distance >= 86400 ? DAY : distance < 60 ? CLOCK_SECONDS : CLOCK;
    ticks.push({ at, text: wall ? clockText(clock, at) : spanTick(at, distance) });
  }
  return ticks;
}

function ticksAlong(axis, low, high, count) {
  return axis === "step" ? linearTicks(low, high, count, true) : timeTicks(low, high, count, axis === "wall");
}

/** Parts of a sorted line, between two places, for so many columns: first, lowest, highest and last of each column; gaps stay. */
function columns(x, y, from, to, low, high, count) {
  if (to - from <= count * 4) {
    return { x: x.subarray ? x.subarray(from, to) : x.slice(from, to), y: y.subarray ? y.subarray(from, to) : y.slice(from, to) };
  }
  const keep = [];
  const width = (high - low) / count;
  let at = from;
  while (at < to) {
    const column = Math.floor((x[at] - low) / width);
    const first = at;
    let least = at;
    let most = at;
    let gap = -1;
    do {
      if (Number.isNaN(y[at])) gap = at;
      else {
        if (!(y[at] >= y[least])) least = at;
        if (!(y[at] <= y[most])) most = at;
      }
      at += 1;
    } while (at < to && Math.floor((x[at] - low) / width) === column);
    const chosen = [...new Set([first, least, most, gap, at - 1])].filter((one) => one >= 0).sort((one, other) => one - other);
    keep.push(...chosen);
  }
  return { x: Float64Array.from(keep, (one) => x[one]), y: Float64Array.from(keep, (one) => y[one]) };
}
