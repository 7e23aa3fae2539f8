#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace tessera::testing {

/// Succeeds when sizes and dtypes are equal and every element is within atol + rtol × |expected|. NaN equals NaN. The failure
/// shows where the greatest difference is. They may be on different devices.
::testing::AssertionResult tensors_close(const at::Tensor& actual, const at::Tensor& expected, double rtol = 1e-5,
                                         double atol = 1e-6);

/// Sizes, dtypes and all elements are equal.
::testing::AssertionResult tensors_equal(const at::Tensor& actual, const at::Tensor& expected);

/// The text of the std::exception that `call` throws, without the C++ stack of c10::Error; "no error" when it throws none.
std::string error_of(const std::function<void()>& call);

/// Succeeds when `call` throws a std::exception whose text (without the C++ stack of c10::Error) contains `part`.
::testing::AssertionResult throws_with_message(const std::function<void()>& call, const std::string& part);

} // namespace tessera::testing

#define EXPECT_TENSORS_CLOSE(...) EXPECT_TRUE(::tessera::testing::tensors_close(__VA_ARGS__))
#define EXPECT_TENSORS_EQUAL(actual, expected) EXPECT_TRUE(::tessera::testing::tensors_equal(actual, expected))
#define EXPECT_THROWS_WITH(statement, part) EXPECT_TRUE(::tessera::testing::throws_with_message([&] { statement; }, part))
