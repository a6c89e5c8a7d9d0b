// Tests of draws with top-k, top-p and min-p.

#include "reference.h"
#include "tests.h"

#include "noise.cuh"

namespace {

double noise_of_token(const RowQuestion& question, u32 token) {
    u32 first = noise_bits(token, question.keys[0], question.keys[1]), second = noise_bits(token, question.keys[2], question.keys[3]);
    return -log(-log1p(-(double(2 * (u64(first) << 20 | second >> 12) + 1) / 9007199254740992.0)));
}

// The token that engine/src/sampling draws, with the functions of the C library.
u32 drawn_from(const vector<float>& logits, const RowQuestion& question, const RowFilter& filter) {
    vector<u32> order(logits.size());
    for (u32 v = 0; v < order.size(); v++) order[v] = v;
    std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return logits[a] > logits[b]; });
    size_t kept = order.size();
    if (filter.top_k > 0) {
        kept = filter.top_k;
        while (kept < order.size() && logits[order[kept]] == logits[order[filter.top_k - 1]]) kept++;
    }
    vector<double> weights;
    double total = 0.0, sum = 0.0;
    for (size_t i = 0; i < kept; i++) {
        weights.push_back(exp((double(logits[order[i]]) - logits[order[0]]) / question.temperature));
        total += weights[i];
    }
    size_t drawable = 0;
    for (; drawable < kept && (filter.top_p >= 1.0f || sum < filter.top_p * total); drawable++) sum += weights[drawable];
    u32 best = ~0u;
    double most = -INFINITY;
    for (size_t i = 0; i < drawable; i++) {
        if (weights[i] < filter.min_p) continue;
        u32 token = order[i];
        double value = logits[token] + question.temperature * noise_of_token(question, token);
        if (value > most || value == most && token < best) most = value, best = token;
    }
    return best;
}

// Returns a number in −1 to 1.
float unit(Random& random) { return float(random.below(2001)) / 1000.0f - 1.0f; }

// Logits of one row: some stand out, or all are nearly equal, or they fall like those of words.
vector<float> some_logits(Random& random, u32 vocab, u32 kind) {
    vector<float> logits(vocab);
    for (u32 v = 0; v < vocab; v++) {
        float place = 1.0f + random.below(vocab);
        logits[v] = kind == 0 ? unit(random) * 2.0f : kind == 1 ? 14.0f - 1.6f * logf(place) : v % 97 == 5 ? 9.0f + unit(random) : unit(random) * 3.0f;
        // Equal logits, and tokens that cannot be drawn.
        if (kind == 3) logits[v] = roundf(logits[v]);
        if (kind > 1 && v % 31 == 7) logits[v] = -INFINITY;
    }
    return logits;
}

// Changes of some tokens: those with large logits, among others. Returns the logits after them.
vector<float> change_some(Random& random, const vector<float>& logits, vector<LogitChange>& changes, u32 kind) {
    vector<float> after = logits;
    for (u32 v = 0; v < logits.size(); v++) {
        if (random.below(kind == 2 ? 2 : logits[v] > 8.0f ? 3 : 40) > 0) continue;
        LogitChange change = {v, -0.0f, 1.0f, 0.0f};
        if (kind != 1 || v % 3 == 0) change.penalty = 1.3f;
        if (kind == 1) change.bias = v % 5 == 0 ? -INFINITY : unit(random) * 4.0f;
        if (kind == 2) change.penalty = 0.9f;
        if (v % 2) change.less = 0.2f + 0.7f * random.below(4);
        changes.push_back(change);
        float logit = logits[v] + change.bias;
        after[v] = (logit < 0 ? logit * change.penalty : logit / change.penalty) - change.less;
    }
    return after;
}

u32 draws = 0, decided = 0, exact_draws = 0, exact_decided = 0;

void check_draws(u32 vocab, u32 capacity, bool exact, u32 seed) {
    Random random(seed);
    u32 rows = 24, groups = (vocab + 15) / 16, parts = 3;
    vector<LogitChange> inputs(sizeof(Step) / sizeof(LogitChange));
    vector<RowQuestion> questions(rows);
    vector<RowFilter> filters(rows);
    vector<vector<float>> logits(rows), after(rows);
    vector<float> values(size_t(rows) * groups * 16, NAN), errors(groups * 16), norms(groups * 16);
    vector<DigitRow> digit_rows(rows);
    for (float& error : errors) error = 0.02f + 0.02f * random.below(5);
    for (u32 r = 0; r < rows; r++) {
        questions[r] = {1, 0.0f, std::array<float, 4>{0.3f, 0.7f, 1.0f, 2.0f}[random.below(4)], 1, {}};
        for (u32& key : questions[r].keys) key = random.below(~0u);
        RowFilter& filter = filters[r];
        filter.is_on = r % 8 != 5;
        filter.top_k = std::array<u32, 5>{0, 0, 0, 1, 20}[random.below(5)];
        filter.top_p = std::array<float, 6>{1.0f, 0.05f, 0.5f, 0.9f, 0.95f, 0.999f}[random.below(6)];
        filter.min_p = std::array<float, 4>{0.0f, 0.0f, 0.02f, 0.3f}[random.below(4)];
        if (filter.top_k == 0 && filter.top_p == 1.0f && filter.min_p == 0.0f) filter.min_p = 0.1f;
        if (!filter.is_on && r % 16 == 5) questions[r].temperature = 0.0f;
        filter.reach = questions[r].temperature * (filter.top_p < 1.0f ? 13.0f : -logf(filter.min_p) * 1.0001f);
        logits[r] = some_logits(random, vocab, random.below(4));
        // Nearly equal logits in twenty groups, with a threshold above most of them.
        bool is_close = !exact && r % 6 == 1;
        if (is_close) {
            for (u32 v = 0; v < vocab; v++) logits[r][v] = v % 16 == 3 && v / 16 < 20 ? 10.0f - 0.01f * (v / 16) : -20.0f;
            questions[r].temperature = 1.0f;
            filter = {1, 0, 0.6f, 0.0f, 13.0f};
        }
        digit_rows[r] = {1.0f, is_close ? 10.0f : std::array<float, 4>{1.0f, 4.0f, 12.0f, 25.0f}[r % 4], 0.0f, 0};
        for (u32 v = 0; v < vocab; v++) {
            float off = exact ? 0.0f : 0.99f * unit(random) * digit_rows[r].by_error * errors[v];
            if (is_close) off = v == 3 ? 9.9f * errors[v] : 0.0f;
            values[size_t(r) * groups * 16 + v] = logits[r][v] + off;
        }
        after[r] = logits[r];
        if (r % 5 < 3) {
            questions[r].first_change = inputs.size();
            after[r] = change_some(random, logits[r], inputs, r % 5);
            questions[r].changes = inputs.size() - questions[r].first_change;
        }
    }
    Step* step = reinterpret_cast<Step*>(inputs.data());
    *step = {rows, 0, 0, rows, 4};
    u32 changes_max = vocab;
    Estimates estimates = {exact ? nullptr : errors.data(), norms.data(), digit_rows.data(), values.data()};
    vector<float> lowest(rows * groups), highest(rows * groups), thresholds(rows, NAN);
    vector<Rest> rests(size_t(rows) * parts, {NAN, NAN, NAN, 0});
    vector<u32> found_counts(rows), some_counts(rows), carried(rows + 4, ~0u);
    vector<Found> found(size_t(rows) * capacity), some(found.size()), drawn(rows, {~0u, NAN}), firsts = drawn;
    vector<Found> changed(size_t(rows) * changes_max, {~0u, NAN});
    vector<u32> changed_counts(rows, ~0u);
    run("logit_bounds", {up(groups, 256), rows + 1, 1}, 256, 0,
        LogitBoundsArgs{step, questions.data(), nullptr, estimates, lowest.data(), highest.data(), vocab, 0});
    vector<float> lowest_before = lowest, highest_before = highest;
    run("take_changed", {2, rows + 1, 1}, 256, 0,
        TakeChangedArgs{step, questions.data(), estimates, values.data(), lowest.data(), highest.data(), changed_counts.data(), changed.data(), vocab, changes_max});
    for (u32 r = 0; r < rows; r++) {
        if (changed_counts[r] != questions[r].changes) printf("row %u has %u changes\n", r, changed_counts[r]), exit(1);
        vector<bool> has_change(groups);
        for (u32 i = 0; i < changed_counts[r]; i++) {
            Found& f = changed[size_t(r) * changes_max + i];
            u32 token = inputs[questions[r].first_change + i].token;
            if (f.token != token || exact && f.logit != logits[r][token]) printf("change %u of row %u is of %u\n", i, r, f.token), exit(1);
            if (values[size_t(r) * groups * 16 + token] != -INFINITY) printf("token %u has an estimate\n", token), exit(1);
            f.logit = logits[r][token];
            has_change[token / 16] = true;
        }
        for (u32 g = r * groups; g < r * groups + groups; g++)
            if (!has_change[g - r * groups] && (lowest[g] != lowest_before[g] || highest[g] != highest_before[g])) printf("bounds without changes\n"), exit(1);
    }
    vector<float> lowest_taken = lowest, highest_taken = highest;
    auto select = [&](const RowFilter* with, vector<u32>& counts, vector<Found>& list) {
        run("logit_bounds", {up(groups, 256), rows + 1, 1}, 256, 0,
            LogitBoundsArgs{step, questions.data(), with, estimates, lowest.data(), highest.data(), vocab, 0});
        run("screen_select", {rows + 1, 1, 1}, 1024, 0,
            SelectArgs{step, questions.data(), with, estimates, lowest.data(), highest.data(), counts.data(), list.data(), thresholds.data(), vocab, capacity});
        for (u32 r = 0; r < rows; r++)
            for (u32 i = 0; i < std::min(counts[r], capacity); i++) {
                Found& f = list[size_t(r) * capacity + i];
                f.logit = logits[r][f.token];
            }
    };
    select(nullptr, found_counts, found);
    if (lowest != lowest_taken || highest != highest_taken) printf("the bounds of groups with changes differ\n"), exit(1);
    run("draw", {rows + 1, 1, 1}, 32, 0,
        DrawArgs{step, questions.data(), found_counts.data(), found.data(), changed.data(), firsts.data(), drawn.data(), carried.data(), capacity, changes_max});
    vector<Found> first = drawn;
    vector<u32> first_counts = found_counts;
    select(filters.data(), some_counts, some);
    run("weigh_rest", {parts, rows + 1, 1}, 256, 0,
        WeighRestArgs{step, questions.data(), filters.data(), estimates, thresholds.data(), firsts.data(), rests.data(), vocab, 0});
    run("filtered_draw", {rows + 1, 1, 1}, 256, 0,
        FilteredDrawArgs{step, questions.data(), filters.data(), found_counts.data(), some_counts.data(), some.data(), thresholds.data(), rests.data(),
                         changed.data(), firsts.data(), drawn.data(), carried.data(), capacity, parts, changes_max, 0});
    for (u32 r = 0; r < rows; r++) {
        const RowFilter& filter = filters[r];
        if (!filter.is_on) {
            if (drawn[r].token != first[r].token || found_counts[r] != first_counts[r]) printf("a row without filters changed\n"), exit(1);
            u32 want = drawn_from(after[r], questions[r], {0, 0, 1.0f, 0.0f, 0.0f});
            if (found_counts[r] <= capacity && (drawn[r].token != want || drawn[r].logit != logits[r][want])) printf("drew %u, not %u\n", drawn[r].token, want), exit(1);
            continue;
        }
        u32 want = drawn_from(after[r], questions[r], filter);
        bool is_decided = found_counts[r] <= capacity;
        (exact ? exact_draws : draws)++, (exact ? exact_decided : decided) += is_decided;
        if (carried[4 + r] != (is_decided ? drawn[r].token : 0)) printf("carried %u\n", carried[4 + r]), exit(1);
        if (is_decided && (drawn[r].token != want || drawn[r].logit != logits[r][want]))
            printf("top_k %u, top_p %g, min_p %g drew %u, not %u\n", filter.top_k, filter.top_p, filter.min_p, drawn[r].token, want), exit(1);
        // Sums that candidates and the rest bound.
        if (filter.top_k == 0 && filter.top_p < 1.0f && some_counts[r] <= capacity) {
            double least = 0.0, most = 0.0, exactly = 0.0, temperature = questions[r].temperature;
            for (u32 p = 0; p < parts; p++) least += rests[r * parts + p].least, most += rests[r * parts + p].most;
            vector<bool> is_candidate(vocab);
            for (u32 i = 0; i < some_counts[r]; i++) is_candidate[some[size_t(r) * capacity + i].token] = true;
            for (u32 i = 0; i < questions[r].changes; i++) is_candidate[inputs[questions[r].first_change + i].token] = true;
            for (u32 v = 0; v < vocab; v++) {
                if (!is_candidate[v]) exactly += exp((double(logits[r][v]) - thresholds[r]) / temperature);
                if (!is_candidate[v] && logits[r][v] >= thresholds[r]) printf("token %u is no candidate\n", v), exit(1);
            }
            if (least > exactly || most < exactly) printf("the rest weighs %g, not %g to %g\n", exactly, least, most), exit(1);
        }
    }
}

void filtered_draws() {
    for (u32 seed = 0; seed < 16; seed++)
        for (bool exact : {false, true}) check_draws(seed % 3 ? 1600 : 530, seed % 2 ? 256 : 64, exact, seed * 2 + exact);
    printf("%u of %u draws are decided, of exact ones %u of %u\n", decided, draws, exact_decided, exact_draws);
    if (decided * 100 < draws * 65 || exact_decided * 100 < exact_draws * 94) exit(1);
}

void exponentials() {
    Random random(3);
    for (u32 i = 0; i < 1000000; i++) {
        double x = -double(random.below(~0u)) / 4294967296.0 * (i % 3 ? 50 : 720), value = exp_f64(x), wanted = x < -708.0 ? 0.0 : exp(x);
        if (!(fabs(value - wanted) <= 1e-15 * wanted)) printf("exp %.17g is %.17g, not %.17g\n", x, value, wanted), exit(1);
    }
    if (exp_f64(0.0) != 1.0 || exp_f64(-INFINITY) != 0.0) printf("exp of 0 or −∞\n"), exit(1);
}

}  // namespace

void test_draw() {
    test("exponentials in f64", exponentials);
    test("draws with filters", filtered_draws);
}
