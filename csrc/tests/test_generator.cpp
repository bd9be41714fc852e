// Random number generators: seeds, states, clones, and the numbers they give. The reference is the counter's kernel,
// and for operators of the native device a native generator with the same seed on a native tensor.
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>

#include <algorithm>
#include <thread>

#include "common.h"
#include "kernels/random_fill.h"
#include "runtime/generator.h"
#include "runtime/substrate.h"

namespace quartz::test {
namespace {

using Numbers = std::vector<double>;

at::Generator seeded(uint64_t seed, c10::DeviceIndex device = 0) {
  auto generator = new_generator(device);
  generator.set_current_seed(seed);
  return generator;
}
at::Generator native_seeded(uint64_t seed) {
  auto generator = substrate().new_native_generator(0);
  generator.set_current_seed(seed);
  return generator;
}

Numbers draw(at::Generator& generator, int64_t count = 100) {
  return values_of(at::rand({count}, generator, quartz_options(generator.device().index())));
}

TEST(Generator, HasTheDevice) {
  EXPECT_EQ(seeded(1).device(), c10::Device(kQuartz, 0));
  EXPECT_EQ(default_generator(0).device(), c10::Device(kQuartz, 0));
  EXPECT_EQ(default_generator(-1).device(), c10::Device(kQuartz, current_device()));
  EXPECT_TRUE(seeded(1).key_set().has(c10::DispatchKey::PrivateUse1));
  EXPECT_EQ(at::globalContext().defaultGenerator(c10::Device(kQuartz, 0)), default_generator(0));
  EXPECT_EQ(native_generator(seeded(1)).device().type(), substrate().native_type());
}

// What random_fill.h gives for a seed and an offset.
std::vector<float> filled(kernels::Distribution distribution, uint64_t seed, uint64_t offset, int64_t count) {
  std::vector<float> numbers(static_cast<size_t>(count));
  kernels::RandomFill fill{};
  fill.result = numbers.data();
  fill.count = count;
  fill.type = kernels::RandomType::kFloat32;
  fill.distribution = distribution;
  fill.source.seed = seed;
  fill.source.offset = offset;
  fill.second = 1;
  kernels::cpu::random_fill(fill, kernels::serial());
  return numbers;
}
Numbers wide(const std::vector<float>& numbers) { return {numbers.begin(), numbers.end()}; }

TEST(Generator, CountsBlocksOfTheCounter) {
  auto ours = seeded(1234);
  EXPECT_EQ(draw(ours, 10), wide(filled(kernels::Distribution::kUniform, 1234, 0, 10)));
  EXPECT_EQ(ours.get_offset(), 3u);
  EXPECT_EQ(values_of(at::randn({37}, ours, quartz_options())),
            wide(filled(kernels::Distribution::kNormal, 1234, 3, 37)));
  EXPECT_EQ(ours.get_offset(), 13u);
  ours.set_offset(1);
  EXPECT_EQ(draw(ours, 6), wide(filled(kernels::Distribution::kUniform, 1234, 1, 6)));
}

TEST(Generator, GivesNativeOperatorsTheNumbersOfANativeOne) {
  auto ours = seeded(1234), native = native_seeded(1234);
  EXPECT_EQ(values_of(at::randint(0, 1000, {20}, ours, quartz_options())),
            values_of(at::randint(0, 1000, {20}, native, native_options())));
  draw(ours);  // moves the counter alone
  EXPECT_EQ(values_of(at::randperm(50, ours, quartz_options().dtype(at::kLong))),
            values_of(at::randperm(50, native, native_options().dtype(at::kLong))));
  auto x = at::empty({64}, quartz_options()), y = at::empty({64}, native_options());
  EXPECT_EQ(values_of(x.log_normal_(1, 2, ours)), values_of(y.log_normal_(1, 2, native)));
  EXPECT_EQ(values_of(x.geometric_(0.3, ours)), values_of(y.geometric_(0.3, native)));
}

TEST(Generator, SeedAndCurrentSeed) {
  auto generator = seeded(99);
  EXPECT_EQ(generator.current_seed(), 99u);
  const auto first = draw(generator);
  EXPECT_NE(draw(generator), first);
  generator.set_current_seed(99);
  EXPECT_EQ(draw(generator), first);
  auto third = seeded(100);
  EXPECT_NE(draw(third), first);
  const auto random_seed = generator.seed();  // a seed of the system's randomness
  EXPECT_EQ(generator.current_seed(), random_seed);
  const auto after = draw(generator);
  generator.set_current_seed(random_seed);
  EXPECT_EQ(draw(generator), after);
}

TEST(Generator, StateRoundTrip) {
  auto generator = seeded(5);
  draw(generator, 7);
  at::Tensor state = generator.get_state();
  EXPECT_TRUE(state.is_cpu());
  EXPECT_EQ(state.scalar_type(), at::kByte);
  const auto expected = draw(generator);
  draw(generator);
  generator.set_state(state);
  EXPECT_EQ(draw(generator), expected);
  auto other = seeded(6);
  other.set_state(state);
  EXPECT_EQ(draw(other), expected);
  EXPECT_EQ(other.current_seed(), 5u);
  EXPECT_THROW(generator.set_state(native_seeded(7).get_state()), c10::Error);  // as before there was a counter
}

TEST(Generator, ABadStateIsRefusedAndTheOldOneStays) {
  auto generator = seeded(5), twin = seeded(5);
  EXPECT_THROW(generator.set_state(at::empty({3}, at::kByte)), c10::Error);
  EXPECT_THROW(generator.set_state(at::empty({3}, at::kFloat)), c10::Error);
  EXPECT_EQ(draw(generator), draw(twin));
}

TEST(Generator, CloneContinuesOnItsOwn) {
  auto generator = seeded(8);
  draw(generator, 3);
  auto clone = generator.clone();
  EXPECT_EQ(clone.device(), generator.device());
  EXPECT_NE(clone, generator);
  const auto expected = draw(generator);
  draw(generator);
  EXPECT_EQ(draw(clone), expected);
}

TEST(Generator, GraphsafeStateIsShared) {
  auto generator = seeded(9);
  auto native = native_seeded(1);
  QUARTZ_EXPECT_ERROR(c10::Error, "expected a quartz generator", generator.graphsafe_set_state(native));
  if (!substrate().is_cuda()) {  // as on the CPU
    QUARTZ_EXPECT_ERROR(c10::Error, "not supported", generator.graphsafe_get_state());
    return;
  }
  auto state = generator.graphsafe_get_state();
  auto other = seeded(10);
  other.graphsafe_set_state(state);
  auto fresh = seeded(9);
  EXPECT_EQ(draw(other, 5), draw(fresh, 5));
}

TEST(Generator, TheDefaultOneIsUsedWithoutAnArgument) {
  auto generator = default_generator(0);
  generator.set_current_seed(77);
  auto other = seeded(77);
  const auto first = values_of(at::rand({10}, quartz_options()));
  EXPECT_EQ(first, draw(other, 10));
  draw(other, 100);  // does not move the default one
  const auto second = values_of(at::rand({10}, quartz_options()));
  EXPECT_NE(first, second);
  auto replay = seeded(77);
  draw(replay, 10);
  EXPECT_EQ(second, draw(replay, 10));
  // A quartz draw leaves the CPU's default generator alone.
  auto cpu = at::globalContext().defaultGenerator(c10::Device("cpu"));
  cpu.set_current_seed(3);
  at::rand({10}, quartz_options());
  const auto undisturbed = values_of(at::rand({10}, at::kFloat));
  cpu.set_current_seed(3);
  EXPECT_EQ(values_of(at::rand({10}, at::kFloat)), undisturbed);
}

TEST(Generator, OfTheWrongDeviceIsRefused) {
  auto cpu = at::globalContext().defaultGenerator(c10::Device("cpu")).clone();
  auto ours = seeded(1);
  QUARTZ_EXPECT_ERROR(c10::Error, "Expected a 'quartz:0' device type for generator but found 'cpu'",
                      at::rand({3}, cpu, quartz_options()));
  auto x = on_quartz({1, 2, 3});
  QUARTZ_EXPECT_ERROR(c10::Error, "Expected a 'quartz:0' device type for generator but found 'cpu'",
                      x.normal_(0, 1, cpu));
  QUARTZ_EXPECT_ERROR(c10::Error, "Expected a 'cpu' device type for generator but found 'quartz:0'",
                      at::rand({3}, ours, at::kFloat));
  QUARTZ_EXPECT_ERROR(c10::Error, "expected a generator of device quartz, got one of cpu", native_generator(cpu));
  EXPECT_EQ(values_of(x), (Numbers{1, 2, 3}));
  EXPECT_TRUE(still_works());
}

TEST(Generator, WithoutImplementationIsRefused) {
  auto x = on_quartz({1, 2, 3});
  EXPECT_THROW(x.normal_(0, 1, at::Generator()), c10::Error);
  EXPECT_TRUE(still_works());
}

TEST(Generator, OfAnUnknownDeviceIsRefused) {
  QUARTZ_EXPECT_ERROR(c10::Error, "invalid device ordinal", new_generator(device_count()));
  QUARTZ_EXPECT_ERROR(c10::Error, "invalid device ordinal", default_generator(device_count()));
  EXPECT_TRUE(still_works());
}

TEST(Generator, ThreadsDrawBlocksOfOneSequence) {
  constexpr int kThreads = 4, kBlocks = 50, kSize = 32;
  auto shared = seeded(11), reference = seeded(11);
  std::vector<Numbers> expected, drawn(kThreads * kBlocks);
  for (int i = 0; i < kThreads * kBlocks; ++i) expected.push_back(draw(reference, kSize));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      auto generator = shared;
      for (int i = 0; i < kBlocks; ++i) drawn[t * kBlocks + i] = draw(generator, kSize);
    });
  }
  for (auto& thread : threads) thread.join();
  std::sort(expected.begin(), expected.end());
  std::sort(drawn.begin(), drawn.end());
  EXPECT_EQ(drawn, expected);
}

}  // namespace
}  // namespace quartz::test
