// Numbers for people.

/** A number of a JSON record, where "nan", "inf" and "-inf" are texts; null is NaN. */
export function number(value) {
  if (typeof value === "number") return value;
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return NaN;
}

/** About `digits` significant digits. */
export function short(value, digits = 3) {
  const x = number(value);
  if (Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  let text;
  if (size >= 1e5 || size < 1e-3) text = x.toExponential(digits - 1).replace("e+", "e");
  else if (size >= 100) text = Math.round(x).toLocaleString("en");
  else text = String(Number(x.toPrecision(digits)));
  return text.replace("-", "−");
}

/** A number on an axis whose ticks are `step` apart, with the decimals that tell them apart. */
export function tickText(value, step) {
  if (Math.abs(value) < step * 1e-6) return "0";
  if (Math.abs(value) >= 1e5 || !(step >= 1e-4)) return short(value, 4);
  let decimals = 0;
  while (decimals < 6 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6) decimals += 1;
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }).replace("-", "−");
}

/** "1 token", "2 tokens". */
export function counted(count, noun, plural = `${noun}s`) {
  return `${typeof count === "number" ? count.toLocaleString("en") : count} ${count === 1 ? noun : plural}`;
}

/** With a sign. */
export function signed(value, digits = 3) {
  const x = number(value);
  return (x > 0 ? "+" : "") + short(x, digits);
}

/** A metric's value with its unit. */
export function withUnit(value, unit) {
  const x = number(value);
  if (!Number.isFinite(x)) return short(x);
  if (unit === "share") return `${short(100 * x)} %`;
  if (unit === "bytes") return x >= 2 ** 30 ? `${short(x / 2 ** 30)} GiB` : `${short(x / 2 ** 20)} MiB`;
  if (unit === "seconds") return `${short(x)} s`;
  return short(x);
}

/** A share in percent. */
export function percent(value) {
  return `${(100 * number(value)).toFixed(0)} %`;
}

/** Unix seconds as local date and time. */
export function when(seconds) {
  if (!seconds) return "";
  return new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

/** Round, evenly spaced numbers around low..high: none below 0 where nothing is, nor above `most`,
 * which no value can exceed. */
export function ticks(low, high, count = 5, most = Infinity) {
  const floor = low >= 0 ? 0 : -Infinity, roof = high <= most ? most : Infinity;
  let span = high - low;
  if (!(span > Math.abs(high) * 1e-9)) {
    const pad = Math.abs(high) * 0.1 || 1;
    low -= pad; high += pad; span = high - low;
  }
  const magnitude = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * magnitude).find((x) => span / x <= count);
  const found = [];
  for (let n = Math.floor(low / step + 1e-9); n <= Math.ceil(high / step - 1e-9); n += 1) found.push(n * step);
  return found.filter((n) => n >= floor && n <= roof);
}

/** Running mean: `amount` from 0 (none) to 0.99, debiased at the start as trackers do. */
export function smooth(points, amount) {
  if (!amount) return points;
  let mean = 0, weight = 0;
  const found = [];
  for (const [x, y] of points) {
    if (!Number.isFinite(y)) continue;
    mean = amount * mean + (1 - amount) * y;
    weight = amount * weight + (1 - amount);
    found.push([x, mean / weight]);
  }
  return found;
}
