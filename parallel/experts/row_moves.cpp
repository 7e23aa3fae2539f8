#include <tessera/parallel/experts/row_moves.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>
#include <utility>

namespace tessera::internal::experts {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What a node keeps for its backward, as autograd's context takes it.
template <typename Value>
struct Held : torch::CustomClassHolder {
  explicit Held(Value held) : value(std::move(held)) {}
  const Value value;
};

template <typename Value>
void hold(AutogradContext* context, const char* name, Value value) {
  context->saved_data[name] = c10::IValue::make_capsule(c10::make_intrusive<Held<Value>>(std::move(value)));
}

template <typename Value>
const Value& held(AutogradContext* context, const char* name) {
  return static_cast<Held<Value>*>(context->saved_data[name].toCapsule().get())->value;
}

at::Tensor taken(const at::Tensor& source, const RowMap& map, int64_t copies) {
  return source.index_select(0, copies == 1 ? map.from : map.from.div(copies, "floor"));
}

at::Tensor put(const at::Tensor& rows, const RowMap& map) {
  if (map.rows() == 0) return at::zeros({map.places(), rows.size(1)}, rows.options());
  const auto placed = rows.index_select(0, map.to.clamp_min(0));
  return map.rows() == map.places() ? placed : placed.masked_fill_(map.to.lt(0).unsqueeze(1), 0);
}

struct TakeRows : torch::autograd::Function<TakeRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& source, const RowMap& map, int64_t copies) {
    hold(context, "map", map);
    context->saved_data["copies"] = copies;
    return taken(source, map, copies);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto copies = context->saved_data["copies"].toInt();
    const auto placed = put_rows(gradients[0], held<RowMap>(context, "map"));
    return {copies == 1 ? placed : placed.view({-1, copies, placed.size(1)}).sum(1), {}, {}};
  }
};

struct PutRows : torch::autograd::Function<PutRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const RowMap& map) {
    hold(context, "map", map);
    return put(rows, map);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {take_rows(gradients[0], held<RowMap>(context, "map")), {}};
  }
};

std::vector<int64_t> in_elements(const std::vector<int64_t>& rows, int64_t width) {
  auto elements = rows;
  for (auto& each : elements) each *= width;
  return elements;
}

RowExchange reversed(const RowExchange& exchange) {
  auto other = exchange;
  std::swap(other.sent, other.received);
  other.name = exchange.name + " (backward)";
  return other;
}

struct ExchangeRows : torch::autograd::Function<ExchangeRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const RowExchange& exchange,
                            const std::shared_ptr<Work>& work) {
    hold(context, "exchange", exchange);
    const auto width = rows.size(1);
    const auto count = std::accumulate(exchange.received.begin(), exchange.received.end(), int64_t{0});
    auto received = at::empty({count, width}, rows.options());
    *work = exchange.communicator->all_to_all(received.view({-1}), rows.contiguous().view({-1}),
                                              in_elements(exchange.received, width), in_elements(exchange.sent, width),
                                              exchange.name);
    return received;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RowsInFlight back(gradients[0], reversed(held<RowExchange>(context, "exchange")));
    return {back.wait(), {}, {}};
  }
};

} // namespace

RowMap map_from(const at::Tensor& from, int64_t places) {
  const auto rows = at::arange(from.size(0), from.options());
  return {from, at::full({places}, -1, from.options()).scatter_(0, from, rows)};
}

at::Tensor take_rows(const at::Tensor& source, const RowMap& map, int64_t copies) { return TakeRows::apply(source, map, copies); }

at::Tensor put_rows(const at::Tensor& rows, const RowMap& map) { return PutRows::apply(rows, map); }

RowsInFlight::RowsInFlight(const at::Tensor& rows, const RowExchange& exchange)
    : received_(exchange.communicator ? ExchangeRows::apply(rows, exchange, work_) : rows) {}

at::Tensor RowsInFlight::wait() {
  work_->wait();
  return std::exchange(received_, {});
}

} // namespace tessera::internal::experts
