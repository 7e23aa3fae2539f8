#include <tessera/plan/planned_model.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <memory>
#include <string_view>

namespace tessera {

namespace {

bool is_kept_product(std::string_view name) {
  return name == "aten::mm" || name == "aten::addmm" || name == "aten::bmm" || name == "aten::baddbmm" ||
         name == "aten::_scaled_mm" || name == "aten::_grouped_mm";
}

} // namespace

RecomputeOptions PassSettings::recompute_options() const {
  if (keeps == RecomputeKeeps::kNothing) return {};
  return {.keep = [products = std::make_shared<int64_t>(0)](const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue>) {
    const std::string_view name = op.operator_name().name;
    return name.starts_with("aten::_scaled_dot_product_") || (is_kept_product(name) && (*products)++ % 2 == 0);
  }};
}

} // namespace tessera
