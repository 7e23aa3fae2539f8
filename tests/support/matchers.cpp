#include "matchers.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <optional>

namespace tessera::testing {

namespace {

::testing::AssertionResult same_geometry(const at::Tensor& actual, const at::Tensor& expected) {
  if (!actual.defined() || !expected.defined())
    return actual.defined() == expected.defined()
               ? ::testing::AssertionSuccess()
               : ::testing::AssertionFailure() << (actual.defined() ? "expected" : "actual") << " is undefined";
  if (actual.sizes() != expected.sizes())
    return ::testing::AssertionFailure() << "sizes are " << actual.sizes() << ", expected " << expected.sizes();
  if (actual.scalar_type() != expected.scalar_type())
    return ::testing::AssertionFailure() << "dtype is " << actual.scalar_type() << ", expected " << expected.scalar_type();
  return ::testing::AssertionSuccess();
}

std::optional<std::string> thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return std::nullopt;
}

} // namespace

::testing::AssertionResult tensors_close(const at::Tensor& actual, const at::Tensor& expected, double rtol, double atol) {
  const c10::AutoGradMode no_grad(false);
  if (auto same = same_geometry(actual, expected); !same) return same;
  if (!actual.defined()) return ::testing::AssertionSuccess();
  const auto got = actual.detach().cpu(), wanted = expected.detach().cpu();
  if (at::allclose(got, wanted, rtol, atol, /*equal_nan=*/true)) return ::testing::AssertionSuccess();
  const auto a = got.to(at::kDouble).flatten(), e = wanted.to(at::kDouble).flatten();
  const auto worst = (a - e).abs().nan_to_num(1e300).argmax().item<int64_t>();
  return ::testing::AssertionFailure() << "tensors of sizes " << actual.sizes() << " differ most at flat index " << worst << ": "
                                       << a[worst].item<double>() << ", expected " << e[worst].item<double>() << " (rtol " << rtol
                                       << ", atol " << atol << ")";
}

::testing::AssertionResult tensors_equal(const at::Tensor& actual, const at::Tensor& expected) {
  return tensors_close(actual, expected, 0, 0);
}

std::string error_of(const std::function<void()>& call) { return thrown_by(call).value_or("no error"); }

::testing::AssertionResult throws_with_message(const std::function<void()>& call, const std::string& part) {
  const auto text = thrown_by(call);
  if (!text) return ::testing::AssertionFailure() << "nothing was thrown, expected an error with: " << part;
  if (text->find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "the error is: " << *text << "\nexpected in it: " << part;
}

} // namespace tessera::testing
